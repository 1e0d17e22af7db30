/* Operations on rows of float32 between the products. Private to the kernels. */
#ifndef TANDEM_NORMS_H
#define TANDEM_NORMS_H

#include "kernels.h"

void td_round(const float *x, int64_t count, bf16 *y);
void td_norm_in_place(float *x, int64_t width, const float *weight, float eps);
void td_add_rows(float *sums, const float *x, int64_t count);

#endif
