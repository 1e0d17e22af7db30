/* Causal attention over the pool's blocks, in place. A step's sequences are computed one after the other, their queries
 * in blocks, their positions in tiles of 64, counted from the sequence's first position. A tile is packed once per KV
 * head and then read by all query rows (token, head of the group) of the block. Each row keeps a running maximum, a
 * running sum and an output that is not divided yet, all in float32 (Dao et al., FlashAttention-2, 2023).
 */
#ifndef TANDEM_ATTENTION_H
#define TANDEM_ATTENTION_H

#include "tile.h"

enum { QUERY_BLOCK_BYTES = 384 * 1024 }; /* of rows' state, which stays in the second-level cache */

static const float UNSEEN = -2e30f;  /* a score that gets no weight: 2^((UNSEEN - LOWEST) * scale) is exactly 0 */
static const float LOWEST = -1e30f;  /* the maximum of every row before its first tile */

/* The rows of a query block, ordered by KV head, then by token, then by the head of the group. */
typedef struct {
    bf16 *query;    /* [rows, head_dim] */
    float *output;  /* [rows, columns], before the division by the sum */
    float *highest; /* [rows] */
    float *sums;    /* [rows, LANES]: each lane has its own sum */
    bf16 *keys;     /* one tile: [head_dim / 2][64][2] */
    bf16 *values;   /* one tile: [columns / 64][32][64][2] */
    int64_t columns, max_tokens;
} State;

/* A part of one sequence's chunk that fits the state. */
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

static int64_t td_attend_bytes(const td_model *model) {
    int64_t columns = td_ceil(model->head_dim, PANEL) * PANEL;
    int64_t rows = block_tokens(model, columns) * model->num_heads;
    return rows * row_bytes(model, columns) + (model->head_dim + columns) * PANEL * 2 + 6 * 64;
}

/* The places of up to 64 positions in the layer's keys or values. Places from `count` on are unused but readable. */
typedef struct {
    int64_t places[PANEL], count;
} Tile;

static void find_tile(const td_model *model, const Span *span, int64_t start, Tile *tile) {
    int64_t token = model->num_kv_heads * model->head_dim;
    int64_t block = start / model->block_size, offset = start % model->block_size;
    tile->count = td_min(PANEL, span->context_len - start);
    for (int64_t i = 0; i < PANEL; i++) {
        tile->places[i] = span->table[block] * model->block_elems + offset * token;
        if (i + 1 < tile->count && ++offset == model->block_size) offset = 0, block++;
    }
}

/* Packs pairs of positions side by side, for the product with the weights. Positions behind the context are packed as
 * zero, because they may hold an infinity or NaN, which times a weight of 0 is not 0. `ahead`: as in pack_rows. */
static void pack_values(const Rows *rows, int64_t head_dim, const Rows *ahead, bf16 *panels) {
    for (int64_t column = 0; column < head_dim; column += 2 * LANES) {
        bf16 *out = panels + column / PANEL * PANEL * PANEL + column % PANEL * 2;
        emask there = first_elements(head_dim - column);
        if (rows->count == PANEL && head_dim - column >= 2 * LANES)
            pack_columns(rows, column, there, ahead, 1, out);
        else
            pack_columns(rows, column, there, ahead, 0, out);
    }
}

/* Returns a bit for each of 64 positions from `start` on: whether a token at `position` sees it. */
static uint64_t visible(int64_t position, int64_t start, int64_t window) {
    int64_t end = position - start + 1, begin = window ? end - window : 0;
    uint64_t mask = end >= PANEL ? ~0ull : (1ull << end) - 1;
    if (begin >= PANEL || end <= 0) return 0;
    return begin > 0 ? mask & ~0ull << begin : mask;
}

/* Returns cap * tanh(x * scaling / cap). */
TD_INLINE vec capped(vec x, float scaling, float cap) {
    vec e = v_exp2(v_mul(x, v_set(2.0f * 1.44269504f * scaling / cap)));
    vec part = v_div(v_set(2.0f), v_add(v_set(1.0f), e));
    return v_mul(v_set(cap), v_sub(v_set(1.0f), part));
}

/* The intermediate values of a block of rows and one tile, between the products with keys and with values. */
typedef struct {
    float scores[TILE_ROWS][PANEL];
    bf16 weights[TILE_ROWS][PANEL];
    float rescale[LANES]; /* the factor by which each row's earlier output is scaled */
    const uint64_t *seen;
} __attribute__((aligned(64))) Softmax;

/* Caps the scores and replaces those of unseen positions. Returns each row's largest score, as largest_lanes does. */
TD_INLINE vec mask_scores(const td_model *model, Softmax *softmax, const int rows) {
    vec most[8];
    TD_UNROLL for (int r = 0; r < rows; r++) {
        vec x[TILE_VECTORS];
        uint64_t seen = softmax->seen[r];
        TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) x[v] = v_load(softmax->scores[r] + v * LANES);
        if (model->softcap > 0 || ~seen)
            TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
                if (model->softcap > 0) x[v] = capped(x[v], model->scaling, model->softcap);
                x[v] = v_where(mask_of_bits(seen >> v * LANES), x[v], v_set(UNSEEN));
                v_store(softmax->scores[r] + v * LANES, x[v]);
            }
        most[r] = v_max_of(x);
    }
    TD_UNROLL for (int r = rows; r < 8; r++) most[r] = most[0];
    return largest_lanes(most);
}

/* Softmax: converts scores to weights in bf16 and updates the rows' maxima and sums. `row`: the first row. */
TD_INLINE void weigh(const td_model *model, const State *state, int64_t row, Softmax *softmax, const int rows) {
    float scale = 1.44269504f * (model->softcap > 0 ? 1.0f : model->scaling);
    float largest[LANES] __attribute__((aligned(64))), shift[TILE_ROWS];
    v_store(largest, mask_scores(model, softmax, rows));
    TD_UNROLL for (int r = 0; r < rows; r++) {
        float before = state->highest[row + r], now = largest[LARGEST_LANE(r)];
        float after = now > before ? now : before;
        state->highest[row + r] = after;
        shift[r] = after * scale;
        softmax->rescale[r] = (before - after) * scale;
    }
    TD_UNROLL for (int r = rows; r < LANES; r++) softmax->rescale[r] = 0;
    v_store(softmax->rescale, v_exp2(v_load(softmax->rescale)));
    TD_UNROLL for (int r = 0; r < rows; r++) {
        float *sums = state->sums + (row + r) * LANES;
        vec sum = v_mul(v_load(sums), v_set(softmax->rescale[r]));
        TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
            vec score = v_load(softmax->scores[r] + v * LANES);
            vec weight = v_exp2(v_fms(score, v_set(scale), v_set(shift[r])));
            sum = v_add(sum, weight);
            store_bf16(softmax->weights[r] + v * LANES, weight);
        }
        v_store(sums, sum);
    }
}

/* Adds the packed tile to the outputs of rows of one KV head, from `row` on: scores, softmax, weighted values. */
TD_INLINE void attend_rows(const td_model *model, const State *state, int64_t row, const uint64_t *seen,
                           const int rows) {
    vec acc[TILE_ROWS][TILE_VECTORS];
    Softmax softmax;
    softmax.seen = seen;
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        acc[r][v] = v_zero();
    multiply(acc, rows, state->query + row * model->head_dim, model->head_dim, state->keys, model->head_dim / 2, NULL,
             0);
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
        v_store(softmax.scores[r] + v * LANES, acc[r][v]);
    weigh(model, state, row, &softmax, rows);
    for (int64_t column = 0; column < state->columns; column += PANEL) {
        float *output = state->output + row * state->columns + column;
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] =
            v_mul(v_load(output + r * state->columns + v * LANES), v_set(softmax.rescale[r]));
        multiply(acc, rows, softmax.weights[0], PANEL, state->values + column * PANEL, PANEL / 2, NULL, 0);
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            v_store(output + r * state->columns + v * LANES, acc[r][v]);
    }
}

#define ROWS_OF(rows)                                                                                                 \
    static void attend_##rows(const td_model *model, const State *state, int64_t row, const uint64_t *seen) {         \
        attend_rows(model, state, row, seen, rows);                                                                   \
    }
#define ROWS_FUNCTION(rows) attend_##rows,
FOR_EACH_ROWS(ROWS_OF)

static void (*const ATTEND[TILE_ROWS])(const td_model *, const State *, int64_t, const uint64_t *) = {
    FOR_EACH_ROWS(ROWS_FUNCTION)};

/* Adds a tile to the outputs of all rows of one KV head whose tokens see any of its positions. */
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
                vec part = v_set(1.0f / v_sum(v_load(state->sums + row * LANES)));
                bf16 *out = output + ((span->first_row + token) * model->num_heads + head * group + g) * dim;
                for (int64_t column = 0; column < dim; column += LANES)
                    store_bf16(out + column, v_mul(v_load(state->output + row * state->columns + column), part));
            }
}

static int64_t first_tile(const td_layer *layer, const Span *span) {
    return layer->window ? td_max(0, span->first_position - layer->window + 1) / PANEL * PANEL : 0;
}

/* `next`: the span after this one, or this one at the step's end. `tile`: this span's first tile; on return, that of
 * `next`. While a tile's keys are packed its values are prefetched, and while its values are packed, the next keys: the
 * processor's own prefetcher follows a weight that is read from end to end, but not these short rows. */
static void attend_span(const td_model *model, const td_layer *layer, const State *state, const Span *span,
                        const Span *next, Tile *tile, const bf16 *query, bf16 *output) {
    int64_t end = span->first_position + span->num_tokens;
    begin_rows(model, state, span, query);
    for (int64_t start = first_tile(layer, span); start < end; start += PANEL) {
        int more = start + PANEL < end;
        Tile after;
        find_tile(model, more ? span : next, more ? start + PANEL : first_tile(layer, next), &after);
        for (int64_t head = 0; head < model->num_kv_heads; head++) {
            int last = head + 1 == model->num_kv_heads;
            int64_t shift = head * model->head_dim;
            Rows keys = {layer->keys + shift, tile->places, tile->count};
            Rows values = {layer->values + shift, tile->places, tile->count};
            Rows next_keys = {layer->keys + shift + model->head_dim, tile->places, 0};
            if (last) next_keys = (Rows){layer->keys, after.places, 0};
            pack_rows(&keys, model->head_dim, &values, state->keys);
            pack_values(&values, model->head_dim, &next_keys, state->values);
            attend_tile(model, layer, state, span, head, start);
        }
        *tile = after;
    }
    finish_rows(model, state, span, output);
}

/* Sets `span` to the next part of the step that fits the state, from `sequence` and `row` on. Returns 0 at the end. */
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
    Tile tile;
    find_tile(model, &span, first_tile(layer, &span), &tile);
    for (int more = 1; more; span = next) {
        next = span;
        more = next_span(step, state.max_tokens, &sequence, &row, &next);
        attend_span(model, layer, &state, &span, &next, &tile, query, output);
    }
}

#endif
