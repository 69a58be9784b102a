"""Checks the lean kernels against the reference in float64."""
import sys, math, torch, itertools
from rfa.ops.filter_attention import robust_filter_attention
from rfa.ops.triton.operator import LEARNED, filter_attention
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Options, Parameters, Problem
from rfa.dynamics import rotation_of_heads

def problem(batch, heads, queries, keys, channels, dtype, device, seed=0, decays=None, scale=1.0, width=None, close=True):
    g = torch.Generator(device="cpu").manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g)
    base = r(1, heads, 1, channels) * scale
    q, k, v = (0.5 * r(batch, heads, n, c) * scale + base[..., :c] for n, c in ((queries, channels), (keys, channels), (keys, width or channels)))
    decay = torch.tensor((decays or [0.0, 0.004, 0.05])[:heads] * math.ceil(heads / 3))[:heads].clone()
    u = lambda: torch.rand(heads, generator=g)
    p = dict(decay=decay, process_noise=0.001 + 0.02 * u(), key_noise=0.3 + u(), query_noise=0.3 + u(), noise_floor=0.01 + 0.1 * u(),
             robustness=2 + 2 * u(), inverse_temperature=0.7 + 0.6 * u())
    p["frequency"] = torch.rand(heads, channels // 2, generator=g) * 0.5
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), {n: x.to(device) for n, x in p.items()}, r(batch, heads, queries, width or channels).to(device, dtype), r(batch, heads, queries).to(device)

def compare(batch, heads, queries, keys, channels, dtype, device="cpu", prior="lyapunov", causal=True, log_sum=False, groups=None, mask=None, horizon=False, weight="student_t", first_block=None, signal=0.0, **kw):
    q, k, v, p, do, dl = problem(batch, heads, queries, keys, channels, dtype, device, **kw)
    if horizon: p["horizon"] = torch.full((heads,), 3.0, device=device)
    def run(f, up):
        leaves = {n: x.detach().clone().to(torch.float64 if up else x.dtype).requires_grad_(n in LEARNED) for n, x in p.items()}
        s = [x.detach().clone().to(torch.float64 if up else x.dtype).requires_grad_() for x in (q, k, v)]
        o, l = f(*s, leaves)
        loss = (o.to(torch.float64) * do.to(torch.float64)).sum()
        if log_sum: loss = loss + (l.to(torch.float64) * dl.to(torch.float64)).sum()
        loss.backward()
        return dict(out=o, log=l, dq=s[0].grad, dk=s[1].grad, dv=s[2].grad, **{n: leaves[n].grad for n in LEARNED})
    def ref(q, k, v, p):
        extra = {} if groups is None else dict(segment_ids=groups)
        if mask is not None: extra['key_mask'] = mask
        if first_block is not None: return windowed(q, k, v, p)
        return robust_filter_attention(q, k, v, **p, causal=causal, prior=prior, weight=weight, backend="reference", return_log_precision=True, **extra)
    def lean(q, k, v, p):
        from rfa.ops.backends import BACKENDS
        pos = checked_positions(batch, queries, keys, q.device, None, None, mask, groups)
        problem = Problem(Parameters(**p), pos, Options(causal=causal, weight=weight, prior=prior, log_precision=True))
        if first_block is not None:
            o, l = filter_attention(q, k, v, problem, first_block)
            return o, l * math.log(2)
        return BACKENDS["triton"].run(q, k, v, problem)
    def windowed(q, k, v, p):
        """Dense, with the keys before a block's first tile left out."""
        t = torch.arange(keys, device=device, dtype=torch.float64)
        c, s = rotation_of_heads(p["frequency"], t[None, None])
        def turn(x, c, s): a, b = x.chunk(2, -1); return torch.cat([c * a + s * b, c * b - s * a], -1)
        off = keys - queries
        q, k, v = turn(q, c[:, :, off:], s[:, :, off:]), turn(k, c, s), turn(v, c, s)
        h = lambda x: x[:, None, None]
        lag = (t[off:, None] - t[None]).clamp(min=0)[None]
        mu = h(p["decay"]); E = torch.exp(-mu * lag)
        phi = torch.where(mu > 0, -torch.expm1(-2 * mu * lag) / (2 * mu.clamp(min=1e-30)), lag)
        S = h(p["process_noise"]) * phi + h(p["key_noise"]) * E**2 + h(p["noise_floor"])
        G = h(p["robustness"]) * (channels // 2) * (S + h(p["query_noise"]))
        r = q.square().sum(-1)[..., None] + E**2 * k.square().sum(-1)[..., None, :] - 2 * E * (q @ k.mT)
        L = h(p["inverse_temperature"]) * (-S.log() - h(p["robustness"] + 1) * torch.log1p(r / G))
        first = first_block.long().repeat_interleave(64, -1)[..., :queries] * 64
        seen = (t[off:, None] >= t[None]) & (t[None] >= first[..., None])
        L = L.masked_fill(~seen, -torch.inf)
        o = (L.softmax(-1) * E) @ v
        return turn(o, c[:, :, off:], -s[:, :, off:]), L.logsumexp(-1)
    a, b = run(ref, True), run(lean, False)
    found = {}
    for n in a:
        x, y = a[n].double().detach(), b[n].double().detach()
        fin = torch.isfinite(x)
        assert (torch.isfinite(y) == fin).all(), n
        found[n] = float((x - y)[fin].norm() / x[fin].norm().clamp(min=1e-30))
    return found

if __name__ == "__main__":
    torch.manual_seed(0)
    for name, args in {
        "bf16": dict(batch=1, heads=3, queries=150, keys=150, channels=16, dtype=torch.bfloat16),
        "bf16 riccati": dict(batch=1, heads=3, queries=200, keys=200, channels=16, dtype=torch.bfloat16, prior="riccati"),
        "fp16 log": dict(batch=2, heads=2, queries=130, keys=130, channels=32, dtype=torch.float16, log_sum=True),
        "bf16 offset": dict(batch=1, heads=3, queries=70, keys=134, channels=16, dtype=torch.bfloat16),
        "fast head": dict(batch=1, heads=3, queries=140, keys=140, channels=16, dtype=torch.bfloat16, decays=[0.5, 0.01, 3.0], prior="riccati"),
        "fp32": dict(batch=1, heads=3, queries=70, keys=77, channels=16, dtype=torch.float32),
        "fp32 both ways": dict(batch=1, heads=3, queries=70, keys=70, channels=16, dtype=torch.float32, causal=False, log_sum=True),
        "mask": dict(batch=2, heads=2, queries=140, keys=140, channels=16, dtype=torch.bfloat16, mask=torch.arange(140)[None] < torch.tensor([[140], [75]])),
        "segments": dict(batch=2, heads=2, queries=200, keys=200, channels=16, dtype=torch.bfloat16, groups=(torch.arange(200)[None] > torch.tensor([[70], [130]])).long()),
        "windows": dict(batch=1, heads=2, queries=320, keys=320, channels=16, dtype=torch.bfloat16, first_block=torch.tensor([[[0, 0, 1, 2, 3], [0, 0, 0, 0, 2]]], dtype=torch.int32), decays=[0.01, 0.05]),
        "exponential": dict(batch=1, heads=3, queries=70, keys=70, channels=16, dtype=torch.float32, weight="exponential"),
    }.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name: continue
        f = compare(**args)
        print(f"{name:16s}", " ".join(f"{n[:8]}={e:.1e}" for n, e in f.items()), flush=True)
