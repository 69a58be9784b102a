"""Temporary: `python -m rfa.bench.instructions.quick [sm_90] [bfloat16] [64] [uniform|times]`."""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

warnings.simplefilter("ignore")
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rfa.ops.backends import BACKENDS
from rfa.ops.positions import Positions
from rfa.ops.problem import Options, Parameters, Problem

from .launches import launches
from .machine_code import product_loops
from .units import kind, products

BIN = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"


def record(arch, uniform, channels, dtype, prior):
    def call():
        B, H, T = 4, 8, 4096

        def t(*s, dtype=torch.float32, grad=False):
            return torch.empty(*s, dtype=dtype, requires_grad=grad)

        states = [t(B, H, T, channels, dtype=dtype, grad=True) for _ in range(3)]
        given = {n: t(H, grad=prior) for n in Parameters._fields[:8]}
        given["frequency"] = t(H, channels // 2)
        times = t(1, T, dtype=torch.float64)
        pos = Positions(times, times, uniform=uniform, complete=True)
        opt = Options(True, "student_t", True, "lyapunov", True, False, False)
        out, _ = BACKENDS["triton"].run(*states, Problem(Parameters(**given), pos, opt))
        out.backward(torch.empty_like(out))

    return launches(call, arch)


def main():
    arch = int((sys.argv[1:] or ["sm_90"])[0].removeprefix("sm_"))
    dtype = getattr(torch, (sys.argv[2:] or ["bfloat16"])[0])
    channels = int((sys.argv[3:] or ["64"])[0])
    uniform = (sys.argv[4:] or ["uniform"])[0] == "uniform"
    seen = {}
    for prior in (False, True):
        for l in record(arch, uniform, channels, dtype, prior):
            if l.identity not in seen:
                seen[l.identity] = (l, l.name + (" with prior's" if prior else ""))
    for l, name in seen.values():
        k = triton.compile(
            ASTSource(l.function, l.signature, l.constants, l.attributes),
            target=GPUTarget("cuda", arch, 32),
            options=l.options,
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(k.asm["cubin"])
            f.flush()
            sass = subprocess.run([BIN / "nvdisasm", "-c", f.name], capture_output=True, text=True).stdout
            usage = subprocess.run(
                [BIN / "cuobjdump", "--dump-resource-usage", f.name], capture_output=True, text=True
            ).stdout
        reg, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        warps = k.metadata.num_warps
        loops = product_loops(sass, lambda x: products(x, warps))
        if not loops:
            continue
        ttir = k.asm["ttir"]
        dots = re.findall(r"tt\.dot.*tensor<(\d+)x(\d+)x\w+> \* tensor<(\d+)x(\d+)x\w+>", ttir)
        print(
            f"{name}: {reg} registers, stack {stack} bytes, shared {k.metadata.shared}, warps {warps}; "
            f"{sum(x in ('LDL', 'STL') for x in re.findall(r'(LDL|STL)', sass))} local loads/stores; dots {dots}"
        )
        first = dots[0]
        # first product's result are the pairs; loops hold equal products a pair
        per_pair = sum(int(a) * int(b) * int(d) for a, b, c, d in dots) / len(loops) / (int(first[0]) * int(first[3]))
        for n, loop in enumerate(loops):
            macs = sum(products(x, warps) for x in loop.body)
            pairs = macs / per_pair
            count = collections.Counter(map(kind, loop.body))
            scale = warps * 32 / pairs
            print(
                f"   loop {n}: {len(loop.body) * scale:.1f} a pair ({len(loop.others) * scale:.1f} more under conditions), "
                f"pairs a trip {pairs:g}; local {count['local']}"
            )
            print("      ", ", ".join(f"{k} {v * scale:.1f}" for k, v in count.most_common()))


if __name__ == "__main__":
    main()
