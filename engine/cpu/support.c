/* Detects whether this processor has the instructions of the other files. Uses none of them. */
#include "kernels.h"

int64_t td_version(void) { return 2; }

int64_t td_supported(void) {
    __builtin_cpu_init(); /* also detects whether the system saves the registers */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
}
