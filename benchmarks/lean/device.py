"""Everything to measure on a GPU in one command; see README.md beside this file."""
import json, os, subprocess, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.environ.get("OUT", "/tmp/out")
TINY = os.environ.get("TINY") == "1"
os.makedirs(OUT, exist_ok=True)
T0 = time.time()
def log(**k):
    with open(f"{OUT}/results.jsonl", "a") as f: f.write(json.dumps(k) + "\n")
    print(f"[{time.time()-float(os.environ.get('T0', T0)):6.1f}]", json.dumps(k), flush=True)
def start(stage, *args):
    env = {**os.environ, "T0": os.environ.get("T0", str(T0)), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, __file__, stage, *map(str, args)], env=env, stdout=sys.stdout, stderr=subprocess.STDOUT)
def wait(p, limit, name):
    try: p.wait(max(1.0, limit)); code = p.returncode
    except subprocess.TimeoutExpired: p.kill(); code = "limit"
    if code != 0: log(stage=name, failed=code)

SHAPE = (1, 2, 130, 16) if TINY else (16, 8, 2048, 64)
# rows, warps, stages, registers, product of T early, stages at the edge
FORWARD = [(64,4,2,168,0,1),(64,4,3,168,0,1),(64,4,1,168,0,1),(64,4,2,168,1,1),(64,4,2,0,0,1),(64,4,3,168,1,1)]
KEY = [(64,4,1,0,0,1),(64,4,1,0,1,1),(64,4,2,0,0,1),(64,4,2,0,1,1),(64,4,3,0,0,1),(32,4,1,168,0,1)]
QUERY = [(64,4,2,0,0,1),(64,4,1,0,0,1),(64,4,3,0,0,1),(64,4,2,0,1,1),(64,4,1,0,1,1),(64,4,3,0,1,1)]
PLAIN = [(64,4,2,168,0,1),(64,4,3,168,0,1)]
if TINY: FORWARD, KEY, QUERY, PLAIN = FORWARD[:1], KEY[:1], QUERY[:1], PLAIN[:1]
def cfg(c): return dict(ROWS=c[0], num_warps=c[1], STAGES=c[2], EARLY=bool(c[4]), EDGE_STAGES=c[5], **({"maxnreg": c[3]} if c[3] else {}))

def m2(device, heads, channels):
    import torch
    decay = torch.tensor([0.0, 0.0, 1.58e-4, 5e-4, 1.58e-3, 5e-3, 1.58e-2, 5e-2])[-heads:]
    one = torch.ones(heads)
    p = dict(decay=decay, process_noise=0.2 * decay.clamp(min=5e-6), key_noise=one, query_noise=one.clone(), noise_floor=0.01 * one, robustness=4 * one, inverse_temperature=one.clone())
    p["frequency"] = torch.rand(heads, channels // 2) * 0.3
    return {n: x.to(device) for n, x in p.items()}
def states(shape, device, dtype):
    import torch
    torch.manual_seed(0)
    return [torch.randn(*shape, device=device, dtype=torch.float32).to(dtype) for _ in range(4)]
def lean_call(shape, device, dtype, params=True, prior="lyapunov", first_block=None, alibi=False):
    import torch
    from rfa.ops.triton import operator as O
    from rfa.ops.filter_attention import located_filter_attention
    from rfa.ops.positions import checked_positions
    from rfa.ops.problem import Options, Parameters, Problem
    q, k, v, do = states(shape, device, dtype)
    for x in (q, k, v): x.requires_grad_()
    p = m2(device, shape[1], shape[3])
    if alibi:
        slopes = 2.0 ** -torch.arange(1, shape[1] + 1, dtype=torch.float64, device=device)
        mu = p["decay"].double(); F2 = torch.exp(-2 * mu); phi = torch.where(mu > 0, (1 - F2) / (2 * mu).clamp(min=1e-30), 1.0)
        r = (p["key_noise"] + p["noise_floor"]).double(); K = 1 - torch.exp(-slopes); x = K * r / (1 - K)
        p["process_noise"] = ((x * x + x * r * (1 - F2)) / (x + r) / phi).float()
    for n in O.LEARNED: p[n].requires_grad_(params)
    pos = checked_positions(shape[0], shape[2], shape[2], q.device, None, None, None, None)
    problem = Problem(Parameters(**p), pos, Options(prior=prior))
    forward = lambda: located_filter_attention(q, k, v, problem, backend="triton")
    if first_block is not None: forward = lambda: O.filter_attention(q, k, v, problem, first_block)[0]
    wanted = [q, k, v] + ([p[n] for n in O.LEARNED] if params else [])
    return forward, lambda: torch.autograd.grad(forward(), wanted, do)
def kernels_of(f, n=4):
    import torch
    from torch.profiler import ProfilerActivity, profile
    for _ in range(2): f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as pr:
        for _ in range(n): f()
        torch.cuda.synchronize()
    found = {}
    for e in pr.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            t = found.setdefault(e.name[:40], [0, 0.0]); t[0] += 1; t[1] += e.device_time
    return {k: [c / n, round(t / n / 1e3, 4)] for k, (c, t) in sorted(found.items(), key=lambda x: -x[1][1])}
def timed(calls, repeats=12):
    """Median ms on the device and of the host for each call, in turns."""
    import torch, statistics
    for f in calls.values():
        for _ in range(3): f()
    torch.cuda.synchronize()
    spent = {n: ([], []) for n in calls}
    for _ in range(repeats):
        for n, f in calls.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # the host gets ahead
            a.record(); h = time.perf_counter(); f(); h = time.perf_counter() - h; b.record(); b.synchronize()
            spent[n][0].append(a.elapsed_time(b)); spent[n][1].append(h * 1e3)
    return {n: [round(statistics.median(x), 4) for x in s] for n, s in spent.items()}

def stage_check():
    import torch
    sys.path.insert(0, HERE)
    import checks as L
    dev = "cpu" if TINY else "cuda"
    b, h = torch.bfloat16, torch.float16
    n = 70 if TINY else 300
    torch.manual_seed(0)
    cases = {"bf16": dict(batch=2, heads=3, queries=n, keys=n, channels=64, dtype=b),
        "bf16 riccati": dict(batch=2, heads=3, queries=n+20, keys=n+20, channels=64, dtype=b, prior="riccati"),
        "fp16 log": dict(batch=2, heads=3, queries=n, keys=n, channels=64, dtype=h, log_sum=True),
        "fast": dict(batch=1, heads=3, queries=n, keys=n, channels=64, dtype=b, decays=[0.5, 0.01, 3.0]),
        "large": dict(batch=1, heads=3, queries=n, keys=n, channels=64, dtype=b, scale=30.0),
        "fp32": dict(batch=1, heads=3, queries=n, keys=n, channels=64, dtype=torch.float32)}
    cases["mask"] = dict(batch=2, heads=3, queries=n, keys=n, channels=64, dtype=b, mask=(torch.arange(n)[None] < torch.tensor([[n], [n // 2]])).to(dev))
    cases["windows"] = dict(batch=1, heads=3, queries=320, keys=320, channels=64, dtype=b, first_block=torch.tensor([[[0, 0, 1, 2, 3], [0, 0, 0, 0, 2], [0] * 5]], dtype=torch.int32).to(dev), decays=[0.01, 0.05, 0.0])
    if "few" in sys.argv: cases = {k: cases[k] for k in ("bf16", "bf16 riccati", "windows")}
    for name, args in cases.items():
        try: log(stage="check", case=name, **{k: float(f"{x:.2e}") for k, x in L.compare(device=dev, **args).items()})
        except Exception as e: log(stage="check", case=name, error=repr(e)[:500])
    if TINY: return
    f, g = lean_call((2, 8, 1024, 64), dev, b)
    x, y = g(), g()
    log(stage="check", repeatable=all(torch.equal(i, j) for i, j in zip(x, y)))
def stage_old():
    import torch
    from rfa.ops.filter_attention import located_filter_attention
    from rfa.ops.positions import checked_positions
    from rfa.ops.problem import Options, Parameters, Problem
    dev = "cpu" if TINY else "cuda"
    def call(shape, dtype):
        q, k, v, do = states(shape, dev, dtype)
        for x in (q, k, v): x.requires_grad_()
        p = m2(dev, shape[1], shape[3])
        learned = [p[n].requires_grad_() for n in p if n not in ("decay", "frequency")]
        pos = checked_positions(shape[0], shape[2], shape[2], q.device, None, None, None, None)
        forward = lambda: located_filter_attention(q, k, v, Problem(Parameters(**p), pos, Options()), backend="triton")
        return forward, lambda: torch.autograd.grad(forward(), [q, k, v, *learned], do), (q, k, v, do, p)
    f, g, _ = call(SHAPE, torch.bfloat16)
    if TINY: return
    if "warm" in sys.argv: g(); return
    log(stage="old", **kernels_of(g))
    fl, gl = lean_call(SHAPE, "cuda", torch.bfloat16)
    log(stage="old in turns", **timed({"old fwd": f, "old fwd+bwd": g, "lean fwd": fl, "lean fwd+bwd": gl}, 6))
def peers(shape):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v, do = states(shape, "cuda", torch.bfloat16)
    for x in (q, k, v): x.requires_grad_()
    def peer(backend):
        def f():
            with sdpa_kernel(backend): return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return f, lambda: torch.autograd.grad(f(), (q, k, v), do)
    calls = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        try:
            f, g = peer(backend); g(); calls[f"{name} fwd"], calls[f"{name} fwd+bwd"] = f, g
        except Exception as e: log(stage="times", peer=name, error=repr(e)[:300])
    return calls
def stage_times():
    import torch
    device = "cpu" if TINY else "cuda"
    fl, gl = lean_call(SHAPE, device, torch.bfloat16)
    gl()
    _, gr = lean_call(SHAPE, device, torch.bfloat16, prior="riccati", alibi=True)
    gr()
    if TINY: return
    if "warm" in sys.argv:
        for shape in ((64, 8, 512, 64), (4, 8, 8192, 64)): lean_call(shape, device, torch.bfloat16)[1]()
        return
    log(stage="kernels", **kernels_of(gl))
    log(stage="times", **timed({"lean fwd": fl, "lean fwd+bwd": gl, "x2 fwd+bwd": gr, **peers(SHAPE)}))
    for shape in ((64, 8, 512, 64), (4, 8, 8192, 64)):
        f, g = lean_call(shape, device, torch.bfloat16)
        log(stage="times", shape=shape, **timed({"lean fwd": f, "lean fwd+bwd": g, **peers(shape)}, 6))
def stage_windows():
    import torch, math
    device = "cpu" if TINY else "cuda"
    shape = (1, 2, 320, 16) if TINY else (1, 8, 32768, 64)
    H, T = shape[1], shape[2]
    slopes = [2.0 ** -h for h in range(1, H + 1)]
    # lags beyond which all keys together have at most 2^-12 of the nearest key's prior, with 20 bits to spare
    most = [math.ceil((32 * math.log(2) - math.log(1 - math.exp(-s))) / s) for s in slopes]
    start = torch.arange(-(-T // 64)) * 64
    first = torch.stack([((start - m).clamp(min=0) // 64) for m in most])[None].to(device, torch.int32)
    fl, gl = lean_call(shape, device, torch.bfloat16, prior="riccati", alibi=True)
    fw, gw = lean_call(shape, device, torch.bfloat16, prior="riccati", alibi=True, first_block=first)
    a, b = gl(), gw()
    log(stage="windows", visited=round(float((start[None].to(device) // 64 + 1 - first[0]).sum() / (start // 64 + 1).sum() / H), 4),
        error=[float(f"{((x.float() - y.float()).norm() / x.float().norm()).item():.2e}") for x, y in zip(a, b)])
    if TINY or "warm" in sys.argv: return
    log(stage="windows", **timed({"x2 fwd": fl, "x2 fwd+bwd": gl, "windows fwd": fw, "windows fwd+bwd": gw, **peers(shape)}, 5))
def stage_step():
    import torch
    from rfa.ops.backends import BACKENDS
    device = "cpu" if TINY else "cuda"
    size = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64) if TINY else dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192)
    tokens = torch.randint(size["vocab_size"], (2, 20) if TINY else (16, 512), device=device)
    whole = BACKENDS["triton"]
    try:
        from rfa.models import RFAForCausalLM, preset
        make = lambda name: RFAForCausalLM(preset(name, **size, backend="triton" if name != "b1-rope" else "auto", train_length=tokens.shape[1]))
        loss_of = lambda model: model(tokens, labels=tokens).loss
    except Exception as e:
        log(stage="step", imports=repr(e)[:300])
        make, loss_of = plain_models(size, tokens)
    def step(name, backend):
        torch.manual_seed(0)
        model = make(name).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not TINY)
        def f():
            BACKENDS["triton"] = backend
            with torch.autocast(device, torch.bfloat16): loss = loss_of(model)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            return loss
        return f
    old = whole._replace(whole=None)
    if "warmold" in sys.argv: print("old", float(step("m2-sc-rfa", old)())); return
    calls = {"m2": step("m2-sc-rfa", whole), "x2": step("x2-riccati-alibi", whole), "b1": step("b1-rope", whole)}
    if "warm" in sys.argv or TINY:
        print([float(f()) for f in calls.values()]); return
    losses = {n: [round(float(f()), 4) for _ in range(4)] for n, f in calls.items()}
    log(stage="step", losses=losses)
    def measure(calls, repeats):
        import statistics
        torch.cuda.synchronize()
        spent = {n: [] for n in calls}
        for _ in range(repeats):
            for n, f in calls.items():
                torch.cuda.synchronize(); a = time.perf_counter(); f(); torch.cuda.synchronize(); spent[n].append(time.perf_counter() - a)
        return {n: round(statistics.median(x) * 1e3, 3) for n, x in spent.items()}
    log(stage="step", **measure(calls, 12))
    log(stage="step device", **{n: round(sum(v[1] for v in kernels_of(f, 3).values()), 3) for n, f in calls.items()})
    calls["m2 old"] = step("m2-sc-rfa", old)
    for _ in range(2): calls["m2 old"]()
    log(stage="step", **measure(calls, 6))
def plain_models(size, tokens):
    import torch
    from torch import nn
    from rfa.nn import RobustFilterAttention
    from rfa.ops.positions import checked_positions
    d, heads, n = size["hidden_size"], size["num_attention_heads"], tokens.shape[1]
    pos = checked_positions(tokens.shape[0], n, n, tokens.device, None)
    class Rope(nn.Module):
        def __init__(s):
            super().__init__(); s.qkv, s.out = nn.Linear(d, 6 * d, bias=False), nn.Linear(2 * d, d, bias=False)
        def forward(s, x):
            b, t, _ = x.shape
            q, k, v = s.qkv(x).view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
            return s.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
    class Block(nn.Module):
        def __init__(s, name):
            super().__init__(); s.a, s.b = nn.RMSNorm(d), nn.RMSNorm(d)
            s.rope = name == "b1-rope"
            s.attention = Rope() if s.rope else RobustFilterAttention(d, heads, prior="riccati" if name.startswith("x2") else "lyapunov", backend="triton")
            s.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        def forward(s, x):
            y = s.a(x); x = x + (s.attention(y) if s.rope else s.attention(y, positions=pos))
            return x + s.mlp(s.b(x))
    class Model(nn.Module):
        def __init__(s, name):
            super().__init__(); s.e = nn.Embedding(size["vocab_size"], d); s.blocks = nn.Sequential(*(Block(name) for _ in range(size["num_hidden_layers"]))); s.h = nn.Linear(d, size["vocab_size"])
        def forward(s, t): return s.h(s.blocks(s.e(t)))
    return Model, lambda m: nn.functional.cross_entropy(m(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
def stage_memory():
    import torch
    g = torch.Generator().manual_seed(0)
    for kw in (dict(), dict(prior="riccati", alibi=True)):
        _, f = lean_call((1, 8, 192, 64), "cuda", torch.bfloat16, **kw); f(); f()
    first = torch.zeros(1, 8, 3, dtype=torch.int32, device="cuda"); first[..., 2] = 1
    _, f = lean_call((1, 8, 192, 64), "cuda", torch.bfloat16, first_block=first); f()
    torch.cuda.synchronize(); print("memory done", flush=True)
def stage_sweep():
    import torch
    from rfa.ops.triton import operator as O
    part, warm = int(sys.argv[2]), "warm" in sys.argv
    lists = (FORWARD, KEY, QUERY) if part == 0 else (FORWARD[:1], KEY[:1], PLAIN)
    for i in range(max(map(len, lists))):
        if warm and i % int(sys.argv[4]) != int(sys.argv[5]): continue
        chosen = [l[min(i, len(l) - 1)] for l in lists]
        for n, c in zip(("forward", "key", "query"), chosen): O.CONFIG[n] = cfg(c) | (dict(COLUMNS=64) if n == "query" else {})
        try:
            _, g = lean_call(SHAPE, "cpu" if TINY else "cuda", torch.bfloat16, params=part == 0)
            if warm or TINY: g(); continue
            t = kernels_of(g, 3)
            log(stage="sweep", part=part, **{n: [c, next((v[1] for k, v in t.items() if k.startswith(f"{n}_kernel")), None)] for n, c in zip(("forward", "key", "query"), chosen)})
        except Exception as e: log(stage="sweep", part=part, chosen=chosen, error=repr(e)[:400])

def stage_small():
    import torch
    for n in (192, 130):
        _, g = lean_call((1, 8, n, 64), "cuda", torch.bfloat16); g()
    torch.cuda.synchronize(); print("small done", flush=True)
def stage_profiled():
    import torch
    _, g = lean_call(SHAPE, "cuda", torch.bfloat16)
    for _ in range(2): g()
    torch.cuda.synchronize()
def start_with(command, name):
    return subprocess.Popen([*command, sys.executable, __file__, name], stdout=open(f"{OUT}/{name}.txt", "w"), stderr=subprocess.STDOUT)

if __name__ == "__main__":
    if len(sys.argv) > 1: globals()[f"stage_{sys.argv[1]}"]()
    else:
        os.environ["T0"] = str(T0)
        limit = float(os.environ.get("LIMIT", 150))
        left = lambda: limit - (time.time() - T0)
        warm = [start("times", "warm"), start("windows", "warm"), start("step", "warm"), start("step", "warmold"), start("check", "few"), start("memory")]
        for i, p in enumerate(warm): wait(p, min(75, left()), f"warm {i}")
        log(stage="warm", seconds=round(time.time() - T0, 1))
        wait(start("times"), min(35, left()), "times")
        wait(start("windows"), min(20, left()), "windows")
        wait(start("step"), min(40, left()), "step")
        if left() > 12: wait(start_with(["compute-sanitizer", "--tool", "memcheck"], "memory"), min(30, left() - 8), "memory")
        if left() > 5: wait(start("check"), left(), "check")
        log(stage="end", seconds=round(time.time() - T0, 1))
