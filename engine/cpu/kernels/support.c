/* Detects which instructions of the other files this processor has. Uses none of them. */
#include "kernels.h"

int64_t td_version(void) { return 3; }

int64_t td_supported(void) {
    __builtin_cpu_init(); /* also detects whether the system saves the registers */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16"))
        return 256;
    return 512;
}
