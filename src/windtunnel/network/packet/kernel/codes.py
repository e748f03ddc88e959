"""Codes of the packet loop: kinds of nodes, packets and events, congestion controls, and states of connections."""

NONE = -1

GPU, SCALE_UP_SWITCH, SWITCH = range(3)
"""`PacketNode.kind`. A scale-up switch forwards without pausing, marking or a limit to its buffer."""

DATA, ACK, NACK, PAUSE, RESUME = range(5)
"""`Packet.kind`."""

UNCONTROLLED, DCQCN, HPCC, TIMELY, DCTCP = 0, 1, 3, 7, 8
"""`PacketKernelSettings.congestion`, with the numbers of SimAI's CC_MODE."""

NO_REDUCTION, EVERY, ALTERNATE = range(3)
"""`PacketFlow.reduction`."""

GO_BACK_N, SELECTIVE_REPEAT = range(2)
"""`PacketKernelSettings.recovery`."""

ECMP, SPRAY, ADAPTIVE = range(3)
"""`PacketKernelSettings.routing`: a path for each connection; a random next hop for each packet; the shortest queue."""

IDLE, READY, WAITING = range(3)
"""`Connection.state`: nothing may be sent; in its link's turn; sends again at `next_send_ps`."""

ARRIVE, SERVE, START, SEND, DECREASE, INCREASE, TIMEOUT = range(7)
"""Kinds of events: a packet reaches the end of its link; a link has work and is free; a flow starts; a connection's
rate lets it send again; DCQCN's two timers; the retransmission timer.
"""
KIND_BITS = 3
NUMBER_BITS = 28
