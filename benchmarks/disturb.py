"""What `measure_vllm.py` lets happen beside a server.

    python benchmarks/disturb.py products          # compute on the same GPU
    python benchmarks/disturb.py stalls PID S EVERY  # stop a process for S seconds, again and again
    python benchmarks/disturb.py spin              # keep a core busy

Each goes on until it is ended.
"""

import os
import signal
import sys
import time


def products() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    while True:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def stalls(process: int, stall_s: float, every_s: float) -> None:
    def end(*_: object) -> None:
        os.kill(process, signal.SIGCONT)
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    while True:
        time.sleep(every_s)
        os.kill(process, signal.SIGSTOP)
        time.sleep(stall_s)
        os.kill(process, signal.SIGCONT)


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    kind, *values = sys.argv[1:]
    if kind == "stalls":
        stalls(int(values[0]), float(values[1]), float(values[2]))
    else:
        {"products": products, "spin": spin}[kind]()
