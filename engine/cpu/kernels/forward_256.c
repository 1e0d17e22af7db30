/* The forward for processors with AVX2 and FMA. */
#define TD_BITS 256
#include "base.h"

TD_TARGET_BEGIN("avx2,fma")
#include "vectors_256.h"
#include "decoder.h"
TD_TARGET_END
