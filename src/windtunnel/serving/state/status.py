"""What a call of a loop returns."""

DONE, MORE, STUCK, OUT_OF_STEPS, ASK_ROUTER, ASK_POLICY, OUT_OF_TABLES, REFUSED = range(8)
"""All requests finished; a buffer is full, call again; a request can never be scheduled; the recorded step durations
are used up; a user's router must say where the request `pending` of the fleet goes; a user's policy must form the batch
of the clock's `slot`; a batch lies outside the look-up tables; a user's policy formed a batch that cannot run."""
