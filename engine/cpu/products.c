/* Products with packed weights: the packing, the loops, and the ends that use the results. */
#include "products.h"
#include "tile.h"

TD_VECTOR_BEGIN

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

void td_store(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
              int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float *out = (float *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS; v++) {
            int64_t feature = panel * PANEL + v * LANES;
            __mmask16 lanes = first_lanes(product->out_features - feature);
            __m512 y = _mm512_load_ps(tile + r * PANEL + v * LANES);
            if (product->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(lanes, product->bias + feature));
            _mm512_mask_storeu_ps(out + feature, lanes, y);
        }
    }
}

void td_add(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
            int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float *out = (float *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS; v++) {
            int64_t feature = panel * PANEL + v * LANES;
            __mmask16 lanes = first_lanes(product->out_features - feature);
            __m512 y = _mm512_load_ps(tile + r * PANEL + v * LANES);
            if (product->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(lanes, product->bias + feature));
            _mm512_mask_storeu_ps(out + feature, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out + feature), y));
        }
    }
}

TD_INLINE __m512 activated(__m512 x, int64_t activation) {
    if (activation == TANDEM_SILU) return times_sigmoid(x, x);
    /* x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return times_sigmoid(x, _mm512_mul_ps(u, _mm512_set1_ps(1.59576912f)));
}

void td_activate(const td_end *end, const td_product *product, int64_t panel, const float *tile, int64_t first_row,
                 int64_t rows) {
    int64_t intermediate = product->out_features / 2;
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = (bf16 *)end->out + (first_row + r) * end->out_stride;
        for (int64_t v = 0; v < TILE_VECTORS / 2; v++) {
            int64_t feature = panel * PANEL / 2 + v * LANES;
            __mmask16 lanes = first_lanes(intermediate - feature);
            __m512 gate = _mm512_load_ps(tile + r * PANEL + v * LANES);
            __m512 up = _mm512_load_ps(tile + r * PANEL + PANEL / 2 + v * LANES);
            if (product->bias) {
                gate = _mm512_add_ps(gate, _mm512_maskz_loadu_ps(lanes, product->bias + feature));
                up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(lanes, product->bias + intermediate + feature));
            }
            store_bf16(out + feature, lanes, _mm512_mul_ps(activated(gate, end->activation), up));
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
    __m512 acc[TILE_ROWS][TILE_VECTORS];
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        acc[r][v] = block->first ? _mm512_setzero_ps() : _mm512_load_ps(block->tile + r * PANEL + v * LANES);
    multiply(acc, rows, block->x, block->stride, block->slab, block->pairs, block->ahead, fetched);
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        _mm512_store_ps(block->tile + r * PANEL + v * LANES, acc[r][v]);
}

#define BLOCK_OF(rows)                                                                                                \
    static void block_##rows##_0(const Block *block) { multiply_block(block, rows, 0); }                              \
    static void block_##rows##_1(const Block *block) { multiply_block(block, rows, 1); }                              \
    static void block_##rows##_2(const Block *block) { multiply_block(block, rows, 2); }                              \
    static void block_##rows##_4(const Block *block) { multiply_block(block, rows, 4); }
#define BLOCKS_OF(rows) {block_##rows##_0, block_##rows##_1, block_##rows##_2, block_##rows##_2, block_##rows##_4}
BLOCK_OF(1) BLOCK_OF(2) BLOCK_OF(3) BLOCK_OF(4) BLOCK_OF(5) BLOCK_OF(6)

static void (*const BLOCKS[TILE_ROWS][5])(const Block *) = { /* [rows - 1][cache lines fetched with each pair] */
    BLOCKS_OF(1), BLOCKS_OF(2), BLOCKS_OF(3), BLOCKS_OF(4), BLOCKS_OF(5), BLOCKS_OF(6)};

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
                int64_t asked = TILE_VECTORS * i / num_blocks, asking = TILE_VECTORS * (i + 1) / num_blocks;
                Block block = {x + row * width + pair * 2, weights, width, pairs, tiles + row * PANEL, slab == 0,
                               next + asked * pairs * 64};
                BLOCKS[count - 1][asking - asked](&block);
                if (slab + 1 == num_slabs) end->take(end, product, panel, tiles + row * PANEL, row, count);
            }
        }
    }
}

void td_multiply(const bf16 *x, int64_t rows, const td_product *product, const td_end *end, float *tiles) {
    if (rows == 0) return;
    (rows <= TILE_ROWS ? multiply_few : multiply_many)(x, rows, product, end, tiles);
}

void td_linear(const bf16 *x, int64_t rows, const td_product *product, float *y, void *scratch) {
    td_end end = {td_store, y, product->out_features, 0};
    td_multiply(x, rows, product, &end, scratch);
}

TD_VECTOR_END
