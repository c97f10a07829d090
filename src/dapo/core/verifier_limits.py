"""Default time limits that verifiers have of their own, in seconds; the configuration compares them with its own."""

CODE_TIME_S = 6.0  # `time_s` of the verifier `code`: for all tests of one response
SERVER_TOTAL_S = 9.0  # `total_s` of the verifier `server`: for a group's verdicts with all retries
