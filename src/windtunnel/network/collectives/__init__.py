"""Collectives as point-to-point flows, one file per algorithm; their equivalence classes; and their run on a fabric.

The rings, PXN hops, NVLS and all-to-all of `SIMAI` layouts are those of SimAI 1.6's `MockNcclGroup.cc`, which mocks
NCCL 2.20; the tables that both write are equal. NCCL layouts differ where NCCL does: rings enter and leave a server on
the same rail.
"""
