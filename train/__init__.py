"""The drafter, its training-time-test unroll, the trainer and the evaluation of accept length."""
