/* The ends of products: functions that use the results while they are in the cache. Private to the kernels. */
#ifndef TANDEM_PRODUCTS_H
#define TANDEM_PRODUCTS_H

#include "kernels.h"

/* `take` uses the results of one panel: `tile` is [rows, 64], for rows from `first_row` on. */
typedef struct td_end td_end;
struct td_end {
    void (*take)(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
                 int64_t rows);
    void *out;             /* float or bf16, depending on `take` */
    int64_t out_stride;
    int64_t activation;    /* of td_activate */
};

/* The ends: y = p, y += p in float32; act(gate) * up in bf16 from a product of td_pack_gate_up. */
void td_store(const td_end *, const td_product *, int64_t, const float *, int64_t, int64_t);
void td_add(const td_end *, const td_product *, int64_t, const float *, int64_t, int64_t);
void td_activate(const td_end *, const td_product *, int64_t, const float *, int64_t, int64_t);

/* `tiles`: td_linear_scratch_bytes(rows). */
void td_multiply(const bf16 *x, int64_t rows, const td_product *product, const td_end *end, float *tiles);

#endif
