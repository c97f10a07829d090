"""What other rooms know of verifiers: limits of time and memory, the largest score, columns of
tests.
"""

CODE_TIME_S = 6.0  # `time_s` of the verifier `code`: for all tests of one response
CODE_MEMORY_MIB = 1024  # `memory_mib` of the verifier `code`: address space of a program
# in size; sums and squares of larger scores, or of advantages, would not be finite in float32
MAX_SCORE = 1e12
# processor time of `regex` and `json_schema` for one response, which is wrong if it needs more
PATTERN_CPU_S = 1.0
SERVER_TOTAL_S = 9.0  # `total_s` of the verifier `server`: for a group's verdicts with all retries
# of a program, which `code` runs; the second as in MBPP, the third as in HumanEval
TEST_COLUMNS = ("tests", "test_list", "test")
