/* Causal attention over the pool's blocks, in place. A step's sequences are taken one after the other, their queries in
 * blocks, their positions in tiles of 64 that are counted from the sequence's first. A tile is packed once per KV head
 * and then read by all query rows (token, head of the group) of the block; each row keeps a running maximum, a running
 * sum and an unfinished output, all float32 (Dao et al., FlashAttention-2, 2023).
 */
#include "tile.h"

TD_VECTOR_BEGIN

enum { QUERY_BLOCK_BYTES = 384 * 1024 }; /* of rows' state: it stays in the second-level cache while tiles pass */

static const float UNSEEN = -2e30f;  /* a score that gets no weight: 2^((UNSEEN - LOWEST) * scale) is exactly 0 */
static const float LOWEST = -1e30f;  /* every row's maximum at first */

/* A query block's rows, one KV head after the other; of each: token by token, the heads of the group. */
typedef struct {
    bf16 *query;    /* [rows, head_dim] */
    float *output;  /* [rows, columns], before the division by the sum */
    float *highest; /* [rows] */
    float *sums;    /* [rows, 16]: a lane's own sum */
    bf16 *keys;     /* one tile: [head_dim / 2][64][2] */
    bf16 *values;   /* one tile: [columns / 64][32][64][2] */
    int64_t columns, max_tokens;
} State;

/* Part of one sequence's chunk. */
typedef struct {
    int64_t first_row, num_tokens; /* in the step */
    int64_t first_position, context_len;
    const int64_t *table;
} Span;

static int64_t row_bytes(const td_model *model, int64_t columns) {
    return columns * 4 + model->head_dim * 2 + 4 + LANES * 4;
}

static int64_t block_tokens(const td_model *model, int64_t columns) {
    return td_max(1, QUERY_BLOCK_BYTES / (row_bytes(model, columns) * model->num_heads));
}

static State divide_scratch(const td_model *model, char *scratch) {
    State state = {.columns = td_ceil(model->head_dim, PANEL) * PANEL};
    state.max_tokens = block_tokens(model, state.columns);
    int64_t rows = state.max_tokens * model->num_heads;
    state.output = (float *)scratch;
    scratch += td_align(rows * state.columns * 4);
    state.sums = (float *)scratch;
    scratch += td_align(rows * LANES * 4);
    state.highest = (float *)scratch;
    scratch += td_align(rows * 4);
    state.query = (bf16 *)scratch;
    scratch += td_align(rows * model->head_dim * 2);
    state.keys = (bf16 *)scratch;
    scratch += td_align(model->head_dim * PANEL * 2);
    state.values = (bf16 *)scratch;
    return state;
}

int64_t td_attend_bytes(const td_model *model) {
    int64_t columns = td_ceil(model->head_dim, PANEL) * PANEL;
    int64_t rows = block_tokens(model, columns) * model->num_heads;
    return rows * row_bytes(model, columns) + (model->head_dim + columns) * PANEL * 2 + 6 * 64;
}

/* One KV head's rows of up to 64 positions; from `count` on, places that may be read. */
typedef struct {
    const bf16 *keys[PANEL], *values[PANEL];
    int64_t count;
} Tile;

static Tile find_tile(const td_model *model, const td_layer *layer, const Span *span, int64_t start) {
    int64_t token = model->num_kv_heads * model->head_dim;
    int64_t block = start / model->block_size, offset = start % model->block_size;
    Tile tile = {.count = td_min(PANEL, span->context_len - start)};
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t place = span->table[block] * model->block_elems + offset * token;
        tile.keys[i] = layer->keys + place;
        tile.values[i] = layer->values + place;
        if (i + 1 < tile.count && ++offset == model->block_size) offset = 0, block++;
    }
    return tile;
}

static void next_head(Tile *tile, int64_t head_dim) {
    for (int64_t i = 0; i < PANEL; i++) tile->keys[i] += head_dim, tile->values[i] += head_dim;
}

/* Pairs of positions side by side, for the product with the weights. Rows from `count` on are zero: what stands in a
 * block behind the context may be anything, and 0 times that need not be 0. `ahead`: as in pack_rows. */
static void pack_values(const bf16 *const rows[PANEL], int64_t count, int64_t head_dim,
                        const bf16 *const ahead[PANEL], bf16 *panels) {
    short order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = (i & 1) * 32 + i / 2, order[1][i] = order[0][i] + 16;
    __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    for (int64_t column = 0; column < head_dim; column += 2 * LANES) {
        __mmask32 there = head_dim - column >= 2 * LANES ? 0xffffffff : 0xffff;
        bf16 *out = panels + column / PANEL * PANEL * PANEL + column % PANEL * 2;
        for (int64_t row = 0; row < PANEL; row += 2, out += PANEL * 2) {
            __m512i a = _mm512_maskz_loadu_epi16(row < count ? there : 0, rows[row] + column);
            __m512i b = _mm512_maskz_loadu_epi16(row + 1 < count ? there : 0, rows[row + 1] + column);
            _mm_prefetch((const char *)(ahead[row] + column), _MM_HINT_T0);
            _mm_prefetch((const char *)(ahead[row + 1] + column), _MM_HINT_T0);
            _mm512_store_si512(out, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(out + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

/* Of 64 positions from `start` on, those that a token at `position` sees. */
static uint64_t visible(int64_t position, int64_t start, int64_t window) {
    int64_t end = position - start + 1, begin = window ? end - window : 0;
    uint64_t mask = end >= PANEL ? ~0ull : (1ull << end) - 1;
    if (begin >= PANEL || end <= 0) return 0;
    return begin > 0 ? mask & ~0ull << begin : mask;
}

/* cap * tanh(x * scaling / cap) */
TD_INLINE __m512 capped(__m512 x, float scaling, float cap) {
    __m512 e = exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(2.0f * 1.44269504f * scaling / cap)));
    __m512 part = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_sub_ps(_mm512_set1_ps(1.0f), part));
}

/* One row's scores become weights in bf16; its maximum and sum go on. Returns what its output so far is worth. */
TD_INLINE float weigh(const td_model *model, const float *scores, uint64_t seen, float *highest, float *sums,
                      bf16 *weights) {
    __m512 x[TILE_VECTORS], most = _mm512_set1_ps(*highest), sum = _mm512_setzero_ps();
    float scale = 1.44269504f * (model->softcap > 0 ? 1.0f : model->scaling);
    TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        x[v] = _mm512_load_ps(scores + v * LANES);
        if (model->softcap > 0) x[v] = capped(x[v], model->scaling, model->softcap);
        x[v] = _mm512_mask_mov_ps(_mm512_set1_ps(UNSEEN), (__mmask16)(seen >> v * LANES), x[v]);
        most = _mm512_max_ps(most, x[v]);
    }
    float before = *highest, after = _mm512_reduce_max_ps(most);
    __m512 shift = _mm512_set1_ps(after * scale);
    TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        x[v] = exp2_ps(_mm512_fmsub_ps(x[v], _mm512_set1_ps(scale), shift));
        sum = _mm512_add_ps(sum, x[v]);
        store_bf16(weights + v * LANES, 0xffff, x[v]);
    }
    __m512 worth = exp2_ps(_mm512_set1_ps((before - after) * scale));
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(sums), worth, sum));
    *highest = after;
    return _mm512_cvtss_f32(worth);
}

/* Rows from `row` on of one KV head, the first of which is that of (token, head) number `number`, against one tile. */
TD_INLINE void attend_rows(const td_model *model, const State *state, int64_t row, const uint64_t *seen,
                           const int rows) {
    __m512 acc[TILE_ROWS][TILE_VECTORS];
    float scores[TILE_ROWS][PANEL] __attribute__((aligned(64)));
    bf16 weights[TILE_ROWS][PANEL] __attribute__((aligned(64)));
    float worth[TILE_ROWS];
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        acc[r][v] = _mm512_setzero_ps();
    multiply(acc, rows, state->query + row * model->head_dim, model->head_dim, state->keys, model->head_dim / 2, NULL,
             0);
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        _mm512_store_ps(scores[r] + v * LANES, acc[r][v]);
    for (int r = 0; r < rows; r++)
        worth[r] = weigh(model, scores[r], seen[r], state->highest + row + r, state->sums + (row + r) * LANES,
                         weights[r]);
    for (int64_t column = 0; column < state->columns; column += PANEL) {
        float *output = state->output + row * state->columns + column;
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] =
            _mm512_mul_ps(_mm512_load_ps(output + r * state->columns + v * LANES), _mm512_set1_ps(worth[r]));
        multiply(acc, rows, weights[0], PANEL, state->values + column * PANEL, PANEL / 2, NULL, 0);
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            _mm512_store_ps(output + r * state->columns + v * LANES, acc[r][v]);
    }
}

#define ROWS_OF(rows)                                                                                                 \
    static void attend_##rows(const td_model *model, const State *state, int64_t row, const uint64_t *seen) {         \
        attend_rows(model, state, row, seen, rows);                                                                   \
    }
ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6)

static void (*const ATTEND[TILE_ROWS])(const td_model *, const State *, int64_t, const uint64_t *) = {
    attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};

/* All rows of one KV head whose tokens see any of the tile. */
static void attend_tile(const td_model *model, const td_layer *layer, const State *state, const Span *span,
                        int64_t head, int64_t start) {
    int64_t group = model->num_heads / model->num_kv_heads;
    int64_t first_token = td_max(0, start - span->first_position), end_token = span->num_tokens;
    if (layer->window) end_token = td_min(end_token, start + PANEL - 1 + layer->window - span->first_position);
    int64_t row = first_token * group, end = end_token * group;
    while (row < end) {
        int64_t blocks = td_ceil(end - row, TILE_ROWS), count = td_ceil(end - row, blocks);
        uint64_t seen[TILE_ROWS];
        for (int64_t r = 0; r < count; r++)
            seen[r] = visible(span->first_position + (row + r) / group, start, layer->window);
        ATTEND[count - 1](model, state, head * span->num_tokens * group + row, seen);
        row += count;
    }
}

static void begin_rows(const td_model *model, const State *state, const Span *span, const bf16 *query) {
    int64_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim, row = 0;
    for (int64_t head = 0; head < model->num_kv_heads; head++)
        for (int64_t token = 0; token < span->num_tokens; token++, row += group)
            memcpy(state->query + row * dim,
                   query + ((span->first_row + token) * model->num_heads + head * group) * dim, group * dim * 2);
    memset(state->output, 0, row * state->columns * 4);
    memset(state->sums, 0, row * LANES * 4);
    for (int64_t r = 0; r < row; r++) state->highest[r] = LOWEST;
}

static void finish_rows(const td_model *model, const State *state, const Span *span, bf16 *output) {
    int64_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim, row = 0;
    for (int64_t head = 0; head < model->num_kv_heads; head++)
        for (int64_t token = 0; token < span->num_tokens; token++)
            for (int64_t g = 0; g < group; g++, row++) {
                __m512 part = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_load_ps(state->sums + row * LANES)));
                bf16 *out = output + ((span->first_row + token) * model->num_heads + head * group + g) * dim;
                for (int64_t column = 0; column < dim; column += LANES)
                    store_bf16(out + column, 0xffff,
                               _mm512_mul_ps(_mm512_load_ps(state->output + row * state->columns + column), part));
            }
}

static int64_t first_tile(const td_layer *layer, const Span *span) {
    return layer->window ? td_max(0, span->first_position - layer->window + 1) / PANEL * PANEL : 0;
}

/* `next`: the span after this one, or itself at the step's end. `tile`: the span's first, and then that of the next.
 * While one head's tile is packed, the next one is asked for: the processor foresees a weight that it reads from one end
 * to the other, but not these short rows. */
static void attend_span(const td_model *model, const td_layer *layer, const State *state, const Span *span,
                        const Span *next, Tile *tile, const bf16 *query, bf16 *output) {
    int64_t end = span->first_position + span->num_tokens;
    begin_rows(model, state, span, query);
    for (int64_t start = first_tile(layer, span); start < end; start += PANEL) {
        int more = start + PANEL < end;
        for (int64_t head = 0; head < model->num_kv_heads; head++) {
            Tile after = *tile;
            if (head + 1 < model->num_kv_heads)
                next_head(&after, model->head_dim);
            else
                after = find_tile(model, layer, more ? span : next, more ? start + PANEL : first_tile(layer, next));
            pack_rows(tile->keys, tile->count, model->head_dim, after.keys, state->keys);
            pack_values(tile->values, tile->count, model->head_dim, after.values, state->values);
            attend_tile(model, layer, state, span, head, start);
            *tile = after;
        }
    }
    finish_rows(model, state, span, output);
}

/* The next piece of the step that `state` has room for, from `sequence` and `row` on; 0 where there is none. */
static int next_span(const td_step *step, int64_t max_tokens, int64_t *sequence, int64_t *row, Span *span) {
    while (*sequence < step->num_sequences && *row == step->query_starts[*sequence + 1]) ++*sequence;
    if (*sequence == step->num_sequences) return 0;
    int64_t left = step->query_starts[*sequence + 1] - *row, context_len = step->context_lens[*sequence];
    *span = (Span){*row, td_min(max_tokens, left), context_len - left, context_len,
                   step->block_tables + *sequence * step->table_stride};
    *row += span->num_tokens;
    return 1;
}

void td_attend(const td_model *model, const td_layer *layer, const td_step *step, const bf16 *query, bf16 *output,
               void *scratch) {
    State state = divide_scratch(model, scratch);
    Span span, next;
    int64_t sequence = 0, row = 0;
    if (!next_span(step, state.max_tokens, &sequence, &row, &span)) return;
    Tile tile = find_tile(model, layer, &span, first_tile(layer, &span));
    for (int more = 1; more; span = next) {
        next = span;
        more = next_span(step, state.max_tokens, &sequence, &row, &next);
        attend_span(model, layer, &state, &span, &next, &tile, query, output);
    }
}

TD_VECTOR_END
