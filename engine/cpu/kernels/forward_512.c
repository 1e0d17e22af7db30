/* The forward for processors with AVX-512 BF16. */
#define TD_BITS 512
#include "base.h"

TD_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "vectors_512.h"
#include "decoder.h"
TD_TARGET_END
