"""What a call of a loop returns."""

DONE, MORE, STUCK, OUT_OF_STEPS, ASK_ROUTER = range(5)
"""What `run` returns: all requests finished; a buffer is full, call again; a request can never be scheduled; the
recorded step durations are used up; a user's router must say where the request `pending` of the fleet goes."""
