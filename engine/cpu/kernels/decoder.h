/* A step through all layers. Owns the order of the parts and the division of scratch among them. */
#ifndef TANDEM_DECODER_H
#define TANDEM_DECODER_H

#include "attention.h"
#include "norms.h"
#include "products.h"
#include "tile.h"

/* The parts of scratch, with one row per token of the step. */
typedef struct {
    bf16 *normed;     /* [tokens, hidden] */
    float *heads;     /* [tokens, all query, key and value heads] */
    bf16 *query;      /* [tokens, heads, head_dim] */
    bf16 *attended;   /* [tokens, heads, head_dim] */
    bf16 *activated;  /* [tokens, intermediate] */
    float *delta;     /* [tokens, hidden]: the output of a part that is normed before it is added */
    float *kept;      /* [tokens, hidden]: the residual stream of the rows with logits */
    float *tiles;     /* of products */
    void *attention;
    char *end;
} Scratch;

static void *take(char **place, int64_t bytes) {
    void *taken = *place;
    *place += td_align(bytes);
    return taken;
}

static Scratch divide(const td_model *model, int64_t tokens, char *scratch) {
    char *place = scratch;
    int64_t query = model->num_heads * model->head_dim, kv = model->num_kv_heads * model->head_dim;
    Scratch parts;
    parts.normed = take(&place, tokens * model->hidden * 2);
    parts.heads = take(&place, tokens * (query + 2 * kv) * 4);
    parts.query = take(&place, tokens * query * 2);
    parts.attended = take(&place, tokens * query * 2);
    parts.activated = take(&place, tokens * model->intermediate * 2);
    parts.delta = take(&place, tokens * model->hidden * 4);
    parts.kept = take(&place, tokens * model->hidden * 4);
    parts.tiles = take(&place, td_linear_scratch_bytes(tokens));
    parts.attention = take(&place, td_attend_bytes(model));
    parts.end = place;
    return parts;
}

int64_t td_scratch_bytes(const td_model *model, int64_t num_tokens) {
    static char none[1];
    return divide(model, num_tokens, none).end - none;
}

/* Rotates the leading elements of one head in halves and writes the head to `out` in bf16. */
static void rotate(const float *x, int64_t dim, int64_t rotary_dim, const float *cos, const float *sin, bf16 *out) {
    int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        vmask lanes = first_lanes(half - i);
        vec a = v_load_some(lanes, x + i), b = v_load_some(lanes, x + half + i);
        vec low = v_mul(b, v_load_some(lanes, sin + i));
        vec high = v_mul(a, v_load_some(lanes, sin + half + i));
        store_some_bf16(out + i, lanes, v_fms(a, v_load_some(lanes, cos + i), low));
        store_some_bf16(out + half + i, lanes, v_fma(b, v_load_some(lanes, cos + half + i), high));
    }
    td_round(x + rotary_dim, dim - rotary_dim, out + rotary_dim);
}

/* Applies query and key norms and the rotation, and writes keys and values to the pool. */
static void place_heads(const td_model *model, const td_layer *layer, const td_step *step, const Scratch *parts) {
    int64_t dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    int64_t whole = model->norms_whole_rows;
    for (int64_t token = 0; token < step->num_tokens; token++) {
        float *query = parts->heads + token * (heads + 2 * kv_heads) * dim, *key = query + heads * dim;
        const float *cos = step->cos[layer->rotary] + token * model->rotary_dim;
        const float *sin = step->sin[layer->rotary] + token * model->rotary_dim;
        int64_t place =
            step->slot_blocks[token] * model->block_elems + step->slot_offsets[token] * kv_heads * dim;
        if (layer->query_norm && whole) td_norm_in_place(query, heads * dim, layer->query_norm, model->norm_eps);
        if (layer->key_norm && whole) td_norm_in_place(key, kv_heads * dim, layer->key_norm, model->norm_eps);
        for (int64_t head = 0; head < heads; head++) {
            if (layer->query_norm && !whole)
                td_norm_in_place(query + head * dim, dim, layer->query_norm, model->norm_eps);
            rotate(query + head * dim, dim, model->rotary_dim, cos, sin, parts->query + (token * heads + head) * dim);
        }
        for (int64_t head = 0; head < kv_heads; head++) {
            if (layer->key_norm && !whole) td_norm_in_place(key + head * dim, dim, layer->key_norm, model->norm_eps);
            rotate(key + head * dim, dim, model->rotary_dim, cos, sin, layer->keys + place + head * dim);
        }
        td_round(key + kv_heads * dim, kv_heads * dim, layer->values + place);
    }
}


/* Writes the input of a product in bf16, normed if the layer has a norm there. */
static void enter(const td_model *model, const float *hidden, int64_t rows, const float *norm, bf16 *out) {
    if (norm)
        td_rms_norm(hidden, rows, model->hidden, norm, model->norm_eps, out);
    else
        td_round(hidden, rows * model->hidden, out);
}

/* Adds a product to the residual stream, normed before if the layer has a norm there. */
static void leave(const td_model *model, const bf16 *x, int64_t rows, const td_product *product, const float *norm,
                  const Scratch *parts, float *hidden) {
    int64_t width = model->hidden;
    td_end end = {norm ? td_store : td_add, norm ? parts->delta : hidden, width, 0};
    td_multiply(x, rows, product, &end, parts->tiles);
    if (!norm) return;
    for (int64_t row = 0; row < rows; row++)
        td_norm_in_place(parts->delta + row * width, width, norm, model->norm_eps);
    td_add_rows(hidden, parts->delta, rows * width);
}

static void attention(const td_model *model, const td_layer *layer, const td_step *step, const Scratch *parts,
                      int last) {
    td_end heads = {td_store, parts->heads, layer->qkv.out_features, 0};
    enter(model, step->hidden, step->num_tokens, layer->input_norm, parts->normed);
    td_multiply(parts->normed, step->num_tokens, &layer->qkv, &heads, parts->tiles);
    place_heads(model, layer, step, parts);
    if (last && step->written) step->written();
    td_attend(model, layer, step, parts->query, parts->attended, parts->attention);
}

static void feed_forward(const td_model *model, const td_layer *layer, int64_t rows, const Scratch *parts,
                         float *hidden) {
    td_end activated = {td_activate, parts->activated, model->intermediate, model->activation};
    enter(model, hidden, rows, layer->ffn_norm, parts->normed);
    td_multiply(parts->normed, rows, &layer->gate_up, &activated, parts->tiles);
    leave(model, parts->activated, rows, &layer->down, layer->ffn_out_norm, parts, hidden);
}

/* After the last layer's attention only rows with logits are needed: moves them to the front. */
static void keep_logit_rows(const td_model *model, const td_step *step, const Scratch *parts) {
    int64_t width = model->num_heads * model->head_dim;
    for (int64_t i = 0; i < step->num_logit_rows; i++) {
        int64_t row = step->logit_rows[i];
        memcpy(parts->kept + i * model->hidden, step->hidden + row * model->hidden, model->hidden * 4);
        memcpy(parts->query + i * width, parts->attended + row * width, width * 2); /* over the queries */
    }
}

void td_run(const td_model *model, const td_step *step) {
    Scratch parts = divide(model, step->num_tokens, step->scratch);
    for (int64_t i = 0; i < model->num_layers; i++) {
        const td_layer *layer = &model->layers[i];
        int last = i + 1 == model->num_layers;
        int64_t rows = last ? step->num_logit_rows : step->num_tokens;
        float *hidden = last ? parts.kept : step->hidden;
        attention(model, layer, step, &parts, last);
        if (last) keep_logit_rows(model, step, &parts);
        leave(model, last ? parts.query : parts.attended, rows, &layer->out, layer->attention_out_norm, &parts, hidden);
        feed_forward(model, layer, rows, &parts, hidden);
    }
    enter(model, parts.kept, step->num_logit_rows, model->final_norm, parts.normed);
    td_linear(parts.normed, step->num_logit_rows, &model->head, step->logits, parts.tiles);
}

#endif
