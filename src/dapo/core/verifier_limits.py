"""Default time limits of single verifiers in seconds, which the configuration compares with reward.timeout_s."""

CODE_TIME_S = 6.0  # `time_s` of the verifier `code`: for all tests of one response
SERVER_TOTAL_S = 9.0  # `total_s` of the verifier `server`: for a group's verdicts with all retries
