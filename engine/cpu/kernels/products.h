/* Products with packed weights: the packing, the loops, and the ends that use the results. */
#ifndef TANDEM_PRODUCTS_H
#define TANDEM_PRODUCTS_H

#include "tile.h"

/* Input features that are computed at once if several blocks of rows read a panel. */
enum { SLAB = 512 };
/* The prefetch distance of a weight that is read only once. */
enum { AHEAD_BYTES = 8192 };

int64_t td_packed_elems(int64_t out_features, int64_t in_features) {
    return td_ceil(out_features, PANEL) * PANEL * in_features;
}

void td_pack(const bf16 *weight, int64_t stride, int64_t out_features, int64_t in_features, bf16 *panels) {
    for (int64_t first = 0; first < out_features; first += PANEL) {
        int64_t places[PANEL];
        for (int64_t r = 0; r < PANEL; r++) places[r] = td_min(first + r, out_features - 1) * stride;
        Rows rows = {weight, places, out_features - first};
        pack_rows(&rows, in_features, &rows, panels + first * in_features);
    }
}

/* A panel has 32 rows of gate, then 32 of up. Rows behind the last feature repeat it; their results are not used. */
void td_pack_gate_up(const bf16 *gate, int64_t gate_stride, const bf16 *up, int64_t up_stride, int64_t intermediate,
                     int64_t in_features, bf16 *panels) {
    for (int64_t first = 0; first < intermediate; first += PANEL / 2) {
        int64_t places[PANEL];
        for (int64_t r = 0; r < PANEL / 2; r++) {
            int64_t feature = td_min(first + r, intermediate - 1);
            places[r] = feature * gate_stride;
            places[PANEL / 2 + r] = up - gate + feature * up_stride;
        }
        Rows rows = {gate, places, PANEL};
        pack_rows(&rows, in_features, &rows, panels + first * 2 * in_features);
    }
}

/* The ends of products use the results while they are in the cache. `take` uses those of one panel: `tile` is [rows, 64],
 * for rows from `first_row` on. */
typedef struct td_end td_end;
struct td_end {
    void (*take)(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
                 int64_t rows);
    void *out;             /* float or bf16, depending on `take` */
    int64_t out_stride;
    int64_t activation;    /* of td_activate */
};

/* y = p in float32. */
static void td_store(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
              int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float *out = (float *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS; v++) {
            int64_t feature = panel * PANEL + v * LANES;
            vmask lanes = first_lanes(product->out_features - feature);
            vec y = v_load(tile + r * PANEL + v * LANES);
            if (product->bias) y = v_add(y, v_load_some(lanes, product->bias + feature));
            v_store_some(out + feature, lanes, y);
        }
    }
}

/* y += p in float32. */
static void td_add(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
            int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float *out = (float *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS; v++) {
            int64_t feature = panel * PANEL + v * LANES;
            vmask lanes = first_lanes(product->out_features - feature);
            vec y = v_load(tile + r * PANEL + v * LANES);
            if (product->bias) y = v_add(y, v_load_some(lanes, product->bias + feature));
            v_store_some(out + feature, lanes, v_add(v_load_some(lanes, out + feature), y));
        }
    }
}

TD_INLINE vec activated(vec x, int64_t activation) {
    if (activation == TANDEM_SILU) return times_sigmoid(x, x);
    /* x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
    vec cube = v_mul(v_mul(x, x), x);
    vec u = v_fma(cube, v_set(0.044715f), x);
    return times_sigmoid(x, v_mul(u, v_set(1.59576912f)));
}

/* y = act(gate) * up in bf16, from a product of td_pack_gate_up. */
static void td_activate(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
                 int64_t rows) {
    int64_t intermediate = product->out_features / 2;
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = (bf16 *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS / 2; v++) {
            int64_t feature = panel * PANEL / 2 + v * LANES;
            vmask lanes = first_lanes(intermediate - feature);
            vec gate = v_load(tile + r * PANEL + v * LANES);
            vec up = v_load(tile + r * PANEL + PANEL / 2 + v * LANES);
            if (product->bias) {
                gate = v_add(gate, v_load_some(lanes, product->bias + feature));
                up = v_add(up, v_load_some(lanes, product->bias + intermediate + feature));
            }
            store_some_bf16(out + feature, lanes, v_mul(activated(gate, end->activation), up));
        }
    }
}

/* The product of a block of rows of x and a slab of one panel. */
typedef struct {
    const bf16 *x, *slab;
    int64_t stride, pairs;
    float *tile;       /* [rows, 64] */
    int first;         /* whether the slab is the panel's first, at which sums begin */
    const char *ahead; /* the address to prefetch from */
} Block;

TD_INLINE void multiply_block(const Block *block, const int rows, const int fetched) {
    vec acc[TILE_ROWS][TILE_VECTORS];
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        acc[r][v] = block->first ? v_zero() : v_load(block->tile + r * PANEL + v * LANES);
    multiply(acc, rows, block->x, block->stride, block->slab, block->pairs, block->ahead, fetched);
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        v_store(block->tile + r * PANEL + v * LANES, acc[r][v]);
}

#define BLOCK_OF(rows)                                                                                                \
    static void block_##rows##_0(const Block *block) { multiply_block(block, rows, 0); }                              \
    static void block_##rows##_1(const Block *block) { multiply_block(block, rows, 1); }                              \
    static void block_##rows##_2(const Block *block) { multiply_block(block, rows, 2); }                              \
    static void block_##rows##_4(const Block *block) { multiply_block(block, rows, 4); }
#define BLOCKS_OF(rows) {block_##rows##_0, block_##rows##_1, block_##rows##_2, block_##rows##_2, block_##rows##_4},
FOR_EACH_ROWS(BLOCK_OF)

static void (*const BLOCKS[TILE_ROWS][5])(const Block *) = { /* [rows - 1][cache lines fetched with each pair] */
    FOR_EACH_ROWS(BLOCKS_OF)};

int64_t td_linear_scratch_bytes(int64_t rows) { return td_align(rows * PANEL * (int64_t)sizeof(float)); }

/* For few rows: reads each panel once and prefetches, so that the memory is always busy. */
static void multiply_few(const bf16 *x, int64_t rows, const td_product *product, const td_end *end, float *tiles) {
    int64_t width = product->in_features;
    for (int64_t panel = 0; panel * PANEL < product->out_features; panel++) {
        const bf16 *weights = product->panels + panel * PANEL * width;
        Block block = {x, weights, width, width / 2, tiles, 1, (const char *)weights + AHEAD_BYTES};
        BLOCKS[rows - 1][4](&block);
        end->take(end, product, panel, tiles, 0, rows);
    }
}

/* For many rows: a slab stays in the cache for all of them. Meanwhile each block of rows prefetches a part of the next
 * slab: of the four cache lines of each pair, those from `asked` up to `asking`. */
static void multiply_many(const bf16 *x, int64_t rows, const td_product *product, const td_end *end, float *tiles) {
    int64_t width = product->in_features, num_slabs = td_ceil(width, SLAB), num_blocks = td_ceil(rows, TILE_ROWS);
    int64_t pairs_each = td_ceil(width / 2, num_slabs);
    for (int64_t panel = 0; panel * PANEL < product->out_features; panel++) {
        for (int64_t slab = 0; slab < num_slabs; slab++) {
            int64_t pair = slab * pairs_each, pairs = td_min(pairs_each, width / 2 - pair);
            const bf16 *weights = product->panels + (panel * width / 2 + pair) * PANEL * 2;
            const char *next = (const char *)(weights + pairs * PANEL * 2);
            for (int64_t i = 0; i < num_blocks; i++) {
                int64_t row = rows * i / num_blocks, count = rows * (i + 1) / num_blocks - row;
                int64_t asked = PAIR_LINES * i / num_blocks, asking = PAIR_LINES * (i + 1) / num_blocks;
                Block block = {x + row * width + pair * 2, weights, width, pairs, tiles + row * PANEL, slab == 0,
                               next + asked * pairs * 64};
                BLOCKS[count - 1][asking - asked](&block);
                if (slab + 1 == num_slabs) end->take(end, product, panel, tiles + row * PANEL, row, count);
            }
        }
    }
}

/* `tiles`: td_linear_scratch_bytes(rows). */
static void td_multiply(const bf16 *x, int64_t rows, const td_product *product, const td_end *end, float *tiles) {
    if (rows == 0) return;
    (rows <= TILE_ROWS ? multiply_few : multiply_many)(x, rows, product, end, tiles);
}

void td_linear(const bf16 *x, int64_t rows, const td_product *product, float *y, void *scratch) {
    td_end end = {td_store, y, product->out_features, 0};
    td_multiply(x, rows, product, &end, scratch);
}

#endif
