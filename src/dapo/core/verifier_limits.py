"""Limits of verifiers: the default time limits in seconds of some, and the largest score of all."""

CODE_TIME_S = 6.0  # `time_s` of the verifier `code`: for all tests of one response
MAX_SCORE = 1e12  # in size; sums and squares of larger scores, or of advantages, would not be finite in float32
PATTERN_CPU_S = 1.0  # processor time of `regex` and `json_schema` for one response, which is wrong if it needs more
SERVER_TOTAL_S = 9.0  # `total_s` of the verifier `server`: for a group's verdicts with all retries
