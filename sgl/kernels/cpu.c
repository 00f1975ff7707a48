/* CPU kernels in float32: paged attention, and the work between a layer's products.
 *
 * cpu.py compiles them for this processor and defines MAX_HEAD_DIM, MAX_QUERIES (of a block) and TILE (keys attended
 * to at a time). Vectors are GCC's portable ones; threads are torch's.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define WIDE 16           /* floats in a vector */
#define AT_ONCE 4         /* queries that attend to a tile together */
#define SERIAL_SIZE 16384 /* elements that are not worth a second thread */

#define INLINE static inline __attribute__((always_inline))

typedef float Wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t WideInt __attribute__((vector_size(4 * WIDE)));
typedef Wide WideAt __attribute__((aligned(4), may_alias)); /* in memory */
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInt __attribute__((vector_size(32)));
typedef Eight EightAt __attribute__((aligned(4), may_alias));

INLINE Wide load(const float *at) { return *(const WideAt *)at; }
INLINE void store(float *at, Wide x) { *(WideAt *)at = x; }
INLINE Eight load_eight(const float *at) { return *(const EightAt *)at; }
INLINE void store_eight(float *at, Eight x) { *(EightAt *)at = x; }
INLINE Wide splat(float x) { return x - (Wide){}; }

/* Select the first number where mask bits are set, else the second. */
INLINE Wide choose(WideInt is_first, Wide first, Wide second)
{
    return (Wide)((is_first & (WideInt)first) | (~is_first & (WideInt)second));
}

INLINE Wide larger(Wide x, Wide y) { return choose(x > y, x, y); }

INLINE Wide rotate_lanes(Wide x, int by)
{
    const WideInt order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(x, (order + by) & (WIDE - 1));
}

INLINE float sum(Wide x)
{
    x += rotate_lanes(x, 8);
    x += rotate_lanes(x, 4);
    x += rotate_lanes(x, 2);
    return x[0] + x[1];
}

INLINE float largest(Wide x)
{
    x = larger(x, rotate_lanes(x, 8));
    x = larger(x, rotate_lanes(x, 4));
    x = larger(x, rotate_lanes(x, 2));
    return x[0] > x[1] ? x[0] : x[1];
}

/* e^x for x <= 88 and NaN; 0 for x < -87. x = n ln 2 + f: n becomes the exponent, e^f a Taylor polynomial; ln 2 has
 * two parts, so that f is exact (Cody & Waite 1980). */
INLINE Wide exponential(Wide x)
{
    const Wide least = splat(-87.0f), shift = splat(12582912.0f); /* 1.5 * 2^23: larger floats are whole */
    Wide bounded = choose(x < least, least, x); /* NaN is not */
    Wide n = bounded * 1.44269504f + shift - shift;
    Wide f = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    Wide power = f * 1.98412698e-4f + 1.38888889e-3f;
    power = power * f + 8.33333333e-3f;
    power = power * f + 4.16666667e-2f;
    power = power * f + 1.66666667e-1f;
    power = power * f + 0.5f;
    power = power * f + 1.0f;
    power = power * f + 1.0f;
    WideInt bits = (WideInt)power + (__builtin_convertvector(n, WideInt) << 23);
    return (Wide)(bits & ~(x < least));
}

/* softcap * tanh(score / softcap) */
INLINE Wide capped(Wide score, float softcap)
{
    Wide e = exponential(larger(score, -score) * (-2 / softcap)); /* at most 1: no overflow */
    Wide size = (1 - e) / (1 + e) * softcap;
    return choose(score < 0, -size, size);
}

/* ---- Norms, rotation, gate ---- */

static float inverse_root_mean_square(const float *x, int64_t n, float eps)
{
    Wide squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        squares += load(x + i) * load(x + i);
    for (; i < n; i++)
        rest += x[i] * x[i];
    return 1 / sqrtf((sum(squares) + rest) / (float)n + eps);
}

/* residual [rows, n] += parts [num_parts, rows, n] (perhaps none); out [rows, n]: its normalised rows. */
void sgl_add_rms_norm(const float *parts, int64_t num_parts, float *residual, const float *weight, float *out,
                      int64_t rows, int64_t n, float eps)
{
#pragma omp parallel for if (rows * n > SERIAL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        float *x = residual + row * n, *to = out + row * n;
        for (int64_t part = 0; part < num_parts; part++)
            for (int64_t i = 0; i < n; i++)
                x[i] += parts[(part * rows + row) * n + i];
        float scale = inverse_root_mean_square(x, n, eps);
        for (int64_t i = 0; i < n; i++)
            to[i] = x[i] * scale * weight[i];
    }
}

/* Rotate qkv [tokens, num_heads + 2 * num_kv_heads, head_dim] by cos and sin [tokens, head_dim]: queries go to out
 * [tokens, num_heads, head_dim], keys and unrotated values to their slots of [slots, num_kv_heads, head_dim].
 * norm [num_heads + num_kv_heads, head_dim]: weights of a norm before rotation, or null. */
void sgl_rotate_and_store(const float *qkv, const float *cos, const float *sin, const float *norm, float *keys,
                          float *values, const int64_t *slots, float *out, int64_t tokens, int64_t num_heads,
                          int64_t num_kv_heads, int64_t head_dim, float eps)
{
    int64_t half = head_dim / 2, size = num_kv_heads * head_dim, width = num_heads * head_dim + 2 * size;
#pragma omp parallel for if (tokens * width > SERIAL_SIZE)
    for (int64_t token = 0; token < tokens; token++) {
        const float *all_heads = qkv + token * width, *c = cos + token * head_dim, *s = sin + token * head_dim;
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            const float *x = all_heads + head * head_dim, *weight = norm ? norm + head * head_dim : 0;
            float *to = head < num_heads ? out + (token * num_heads + head) * head_dim
                                         : keys + slots[token] * size + (head - num_heads) * head_dim;
            float scale = norm ? inverse_root_mean_square(x, head_dim, eps) : 1;
            for (int64_t i = 0; i < half; i++) {
                float first = norm ? x[i] * scale * weight[i] : x[i];
                float second = norm ? x[half + i] * scale * weight[half + i] : x[half + i];
                to[i] = first * c[i] + second * s[i];
                to[half + i] = second * c[half + i] + first * s[half + i];
            }
        }
        memcpy(values + slots[token] * size, all_heads + width - size, sizeof(float) * size);
    }
}

/* gate * sigmoid(at) * up */
INLINE Wide times_sigmoid(Wide gate, Wide at, Wide up)
{
    Wide e = exponential(choose(at < 0, at, -at)); /* at most 1: no overflow */
    return choose(at < 0, gate * e, gate) / (1 + e) * up;
}

/* silu: as it is; gelu: by tanh, 2 * sqrt(2 / pi) of the usual argument; or clamped to a limit above 0. */
INLINE Wide gated(Wide gate, Wide up, int64_t is_gelu, float alpha, float limit)
{
    if (is_gelu)
        return times_sigmoid(gate, gate * (gate * gate * 0.044715f + 1) * 1.59576912f, up);
    if (limit <= 0)
        return times_sigmoid(gate, gate, up);
    gate = choose(gate > limit, splat(limit), gate);
    up = choose(up > limit, splat(limit), choose(up < -limit, splat(-limit), up));
    return times_sigmoid(gate, gate * alpha, up + 1);
}

/* out [rows, n] = the activated gate * up of gate_up [rows, 2n]. */
void sgl_gate(const float *gate_up, float *out, int64_t rows, int64_t n, int64_t is_gelu, float alpha, float limit)
{
#pragma omp parallel for if (rows * n > SERIAL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * n, *up = gate + n;
        float *to = out + row * n;
        int64_t i = 0, rest;
        for (; i + WIDE <= n; i += WIDE)
            store(to + i, gated(load(gate + i), load(up + i), is_gelu, alpha, limit));
        if ((rest = n - i)) {
            Wide x = {}, y = {};
            memcpy(&x, gate + i, rest * sizeof(float));
            memcpy(&y, up + i, rest * sizeof(float));
            x = gated(x, y, is_gelu, alpha, limit);
            memcpy(to + i, &x, rest * sizeof(float));
        }
    }
}

/* x [n] = cap * tanh(x / cap) */
void sgl_cap(float *x, int64_t n, float cap)
{
#pragma omp parallel for if (n > SERIAL_SIZE)
    for (int64_t i = 0; i < n; i += WIDE) {
        Wide some = {};
        int64_t size = sizeof(float) * (n - i < WIDE ? n - i : WIDE);
        memcpy(&some, x + i, size);
        some = capped(some, cap);
        memcpy(x + i, &some, size);
    }
}

/* ---- Products ---- */

#define COLUMNS (2 * WIDE) /* of a panel: its weights are [k, COLUMNS] */
#define CHUNK_ROWS 96      /* that pass all panels before the next */
#define SMALL_PRODUCT 65536 /* multiplications that are not worth a second thread */
#ifdef __AVX512F__
#define ROWS_AT_ONCE 12
#else
#define ROWS_AT_ONCE 4
#endif

/* Some rows of a panel. Each result is one chain of multiply-adds over k in order, then the bias: it depends on
 * nothing but its row and column, whatever the number of rows. */
INLINE void multiply_some(const float *x, const float *panel, const float *bias, float *out, int64_t n, int64_t k,
                          int64_t width, int some)
{
    Wide sums[ROWS_AT_ONCE][2] = {};
    for (int64_t i = 0; i < k; i++) {
        Wide left = load(panel + i * COLUMNS), right = load(panel + i * COLUMNS + WIDE);
        for (int row = 0; row < some; row++) {
            sums[row][0] += left * x[row * k + i];
            sums[row][1] += right * x[row * k + i];
        }
    }
    for (int row = 0; row < some; row++) {
        float result[COLUMNS];
        store(result, sums[row][0]);
        store(result + WIDE, sums[row][1]);
        for (int64_t column = 0; bias && column < width; column++)
            result[column] += bias[column];
        memcpy(out + row * n, result, width * sizeof(float));
    }
}

/* out [rows, n] = x [rows, k] times a matrix in panels [n / COLUMNS, k, COLUMNS], plus bias [n] or NULL. */
void sgl_multiply(const float *x, const float *panels, const float *bias, float *out, int64_t rows, int64_t n,
                  int64_t k)
{
    for (int64_t begin = 0; begin < rows; begin += CHUNK_ROWS) {
        int64_t end = begin + CHUNK_ROWS < rows ? begin + CHUNK_ROWS : rows;
#pragma omp parallel for if ((end - begin) * n * k > SMALL_PRODUCT)
        for (int64_t first = 0; first < n; first += COLUMNS) {
            const float *panel = panels + first * k, *its_bias = bias ? bias + first : NULL;
            int64_t width = n - first < COLUMNS ? n - first : COLUMNS, row = begin;
            for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE)
                multiply_some(x + row * k, panel, its_bias, out + row * n + first, n, k, width, ROWS_AT_ONCE);
            for (; row + 4 <= end; row += 4)
                multiply_some(x + row * k, panel, its_bias, out + row * n + first, n, k, width, 4);
            for (; row < end; row++)
                multiply_some(x + row * k, panel, its_bias, out + row * n + first, n, k, width, 1);
        }
    }
}

/* ---- Attention ----
 *
 * Online softmax (Milakov & Gimelshein 2018) over a kv head's keys, tile by tile: larger scores scale a query's sum
 * of values down, and the sum of weights divides it at the end. Tiles begin at multiples of TILE, so that a query's
 * result does not depend on other queries; keys that it does not see add zeros. */

/* A step, for all layers; see attention/cpu.py. */
typedef struct {
    const int32_t *pages;                     /* [rows, table_width] */
    const int32_t *starts, *q_lens, *kv_lens; /* [rows]: first token, number of tokens, of keys */
    const int32_t *shared_keys;               /* [rows]: leading keys that a row's group attends to, in full tiles */
    const int32_t *groups, *members;          /* group g: rows members[groups[g]] … members[groups[g + 1] - 1] */
    const int32_t *blocks;                    /* [num_blocks, 2]: a row, and the first of its queries in the block */
    float *max_scores, *weight_sums;          /* [tokens, num_heads]: workspace */
    int64_t table_width, num_groups, num_blocks, num_heads, num_kv_heads, head_dim, page_size, is_small;
    float scale, softcap; /* no cap: 0 */
} Step;

typedef struct {
    const float *query, *keys, *values;
    float *out;
    int64_t window;     /* 0: none */
    const float *sinks; /* [num_heads], or NULL */
} Layer;

typedef struct {
    const float *query;
    float *out, *max_score, *weight_sum; /* so far; out: the weighted sum of values */
    int64_t first, last;                 /* visible positions */
    const float *sink;                   /* or NULL */
} Query;

typedef struct {
    int64_t position, count;   /* of the first key; how many */
    const float *values[TILE];
    float keys[MAX_HEAD_DIM * TILE]; /* [head_dim, TILE] */
} Tile;

/* Transpose 8 x 8 numbers to columns that are TILE apart. */
INLINE void transpose(const float *const *rows, int64_t column, float *to)
{
    Eight a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = load_eight(rows[i] + column);
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shuffle(a[i], a[i + 1], (EightInt){0, 8, 2, 10, 4, 12, 6, 14});
        b[i + 1] = __builtin_shuffle(a[i], a[i + 1], (EightInt){1, 9, 3, 11, 5, 13, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            a[j] = __builtin_shuffle(b[j], b[j + 2], (EightInt){0, 1, 8, 9, 4, 5, 12, 13});
            a[j + 2] = __builtin_shuffle(b[j], b[j + 2], (EightInt){2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int i = 0; i < 4; i++) {
        store_eight(to + i * TILE, __builtin_shuffle(a[i], a[i + 4], (EightInt){0, 1, 2, 3, 8, 9, 10, 11}));
        store_eight(to + (i + 4) * TILE, __builtin_shuffle(a[i], a[i + 4], (EightInt){4, 5, 6, 7, 12, 13, 14, 15}));
    }
}

/* Load a row's keys of a kv head from `position`, up to `stop` or a full tile; in the place of those before `first`,
 * which nobody sees and others may write, the first. */
static void gather(const Step *step, const Layer *layer, int64_t row, int64_t kv_head, int64_t position, int64_t first,
                   int64_t stop, Tile *tile)
{
    const int32_t *pages = step->pages + row * step->table_width;
    int64_t unseen = first > position ? first - position : 0;
    int64_t page = (position + unseen) / step->page_size, offset = (position + unseen) % step->page_size;
    const float *keys[TILE];
    tile->position = position;
    tile->count = stop - position < TILE ? stop - position : TILE;
    for (int64_t i = unseen; i < tile->count; i++) {
        int64_t slot = pages[page] * step->page_size + offset;
        int64_t at = (slot * step->num_kv_heads + kv_head) * step->head_dim;
        keys[i] = layer->keys + at;
        tile->values[i] = layer->values + at;
        if (++offset == step->page_size)
            page++, offset = 0;
    }
    for (int64_t i = 0; i < unseen; i++) {
        keys[i] = keys[unseen];
        tile->values[i] = tile->values[unseen];
    }
    for (int64_t i = tile->count; i % 8; i++) { /* pad to multiples of eight with unseen keys */
        keys[i] = keys[0];
        tile->values[i] = tile->values[0];
    }
    for (int64_t i = 0; i < tile->count; i += 8)
        for (int64_t d = 0; d < step->head_dim; d += 8)
            transpose(keys + i, d, tile->keys + d * TILE + i);
}

/* The weights [some, TILE] of a tile's keys (in so many vectors) for some queries. */
INLINE void weigh(const Step *step, const Tile *tile, const Query *queries, float *weights, int some, int vectors)
{
    const WideInt order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t end = tile->position + tile->count - 1;
    Wide scores[AT_ONCE][TILE / WIDE] = {};
    for (int64_t d = 0; d < step->head_dim; d++)
        for (int v = 0; v < vectors; v++) {
            Wide keys = load(tile->keys + d * TILE + v * WIDE);
            for (int i = 0; i < some; i++)
                scores[i][v] += keys * queries[i].query[d];
        }
    for (int i = 0; i < some; i++) {
        const Query *query = queries + i;
        int32_t first = query->first > tile->position ? query->first - tile->position : 0;
        int32_t last = (query->last < end ? query->last : end) - tile->position;
        Wide largest_scores = splat(*query->max_score), sums = {};
        for (int v = 0; v < vectors; v++) {
            WideInt at = order + v * WIDE;
            scores[i][v] *= step->scale;
            if (step->softcap > 0)
                scores[i][v] = capped(scores[i][v], step->softcap);
            if (first > 0 || last < vectors * WIDE - 1)
                scores[i][v] = choose((at >= first) & (at <= last), scores[i][v], splat(-INFINITY));
            largest_scores = larger(scores[i][v], largest_scores);
        }
        float max_score = largest(largest_scores);
        for (int v = 0; v < vectors; v++) {
            Wide weight = exponential(scores[i][v] - max_score);
            store(weights + i * TILE + v * WIDE, weight);
            sums += weight;
        }
        if (max_score > *query->max_score) {
            float scale = expf(*query->max_score - max_score);
            *query->max_score = max_score;
            *query->weight_sum *= scale;
            for (int64_t d = 0; d < step->head_dim; d++)
                query->out[d] *= scale;
        }
        *query->weight_sum += sum(sums);
    }
}

/* Add a tile's weighted values for some queries, two keys at a time with independent sums. */
INLINE void add_values(const Step *step, const Tile *tile, const Query *queries, const float *weights, int some)
{
    int64_t d = 0;
    for (; d + WIDE <= step->head_dim; d += WIDE) {
        Wide even[AT_ONCE], odd[AT_ONCE] = {};
        for (int i = 0; i < some; i++)
            even[i] = load(queries[i].out + d);
        for (int64_t j = 0; j < tile->count; j += 2) {
            Wide first = load(tile->values[j] + d), second = load(tile->values[j + 1] + d);
            for (int i = 0; i < some; i++) {
                even[i] += first * weights[i * TILE + j];
                odd[i] += second * weights[i * TILE + j + 1];
            }
        }
        for (int i = 0; i < some; i++)
            store(queries[i].out + d, even[i] + odd[i]);
    }
    if (d < step->head_dim) {
        Eight even[AT_ONCE], odd[AT_ONCE] = {};
        for (int i = 0; i < some; i++)
            even[i] = load_eight(queries[i].out + d);
        for (int64_t j = 0; j < tile->count; j += 2) {
            Eight first = load_eight(tile->values[j] + d), second = load_eight(tile->values[j + 1] + d);
            for (int i = 0; i < some; i++) {
                even[i] += first * weights[i * TILE + j];
                odd[i] += second * weights[i * TILE + j + 1];
            }
        }
        for (int i = 0; i < some; i++)
            store_eight(queries[i].out + d, even[i] + odd[i]);
    }
}

INLINE void attend_some(const Step *step, const Tile *tile, const Query *queries, int some, int vectors)
{
    float weights[AT_ONCE * TILE];
    weigh(step, tile, queries, weights, some, vectors);
    add_values(step, tile, queries, weights, some);
}

INLINE void attend_all(const Step *step, const Tile *tile, const Query *queries, int64_t count, int vectors)
{
    int64_t i = 0;
    for (; i + AT_ONCE <= count; i += AT_ONCE)
        attend_some(step, tile, queries + i, AT_ONCE, vectors);
    for (; i + 2 <= count; i += 2)
        attend_some(step, tile, queries + i, 2, vectors);
    if (i < count)
        attend_some(step, tile, queries + i, 1, vectors);
}

static void attend(const Step *step, const Tile *tile, const Query *queries, int64_t count)
{
    /* constants keep scores in registers */
    if (tile->count <= WIDE)
        attend_all(step, tile, queries, count, 1);
    else if (tile->count <= 2 * WIDE)
        attend_all(step, tile, queries, count, 2);
    else if (tile->count <= 3 * WIDE)
        attend_all(step, tile, queries, count, 3);
    else
        attend_all(step, tile, queries, count, 4);
}

/* The first position that a query sees. */
INLINE int64_t first_seen(const Layer *layer, int64_t position)
{
    return layer->window && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Append a row's queries of a kv head, by token, then head, from number `from` on, while there is room; returns their
 * number then. */
static int64_t append(const Step *step, const Layer *layer, int64_t row, int64_t kv_head, int64_t from, Query *queries,
                      int64_t count)
{
    int64_t group = step->num_heads / step->num_kv_heads, token = from / group, head = from % group;
    int64_t past = step->kv_lens[row] - step->q_lens[row];
    while (count < MAX_QUERIES && token < step->q_lens[row]) {
        int64_t at = (step->starts[row] + token) * step->num_heads + kv_head * group + head, last = past + token;
        queries[count++] = (Query){layer->query + at * step->head_dim, layer->out + at * step->head_dim,
                                   step->max_scores + at, step->weight_sums + at, first_seen(layer, last), last,
                                   layer->sinks ? layer->sinks + kv_head * group + head : NULL};
        if (++head == group)
            token++, head = 0;
    }
    return count;
}

static void begin(const Step *step, const Query *queries, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        *queries[i].max_score = queries[i].sink ? *queries[i].sink : -FLT_MAX;
        *queries[i].weight_sum = queries[i].sink ? 1 : 0;
        memset(queries[i].out, 0, sizeof(float) * step->head_dim);
    }
}

/* Attend to a group's shared keys of one kv head, each tile for all rows. */
static void attend_shared(const Step *step, const Layer *layer, int64_t group, int64_t kv_head)
{
    const int32_t *members = step->members + step->groups[group];
    int64_t num_members = step->groups[group + 1] - step->groups[group], stop = step->shared_keys[members[0]];
    Tile tile;
    Query queries[MAX_QUERIES];
    for (int64_t position = 0; position < stop; position += TILE) {
        gather(step, layer, members[0], kv_head, position, 0, stop, &tile);
        /* blocks of queries, a row's after another's: a full one, and the last, attend to the tile */
        for (int64_t i = 0, from = 0, count = 0; i < num_members;) {
            int64_t before = count;
            count = append(step, layer, members[i], kv_head, from, queries, before);
            if (count < MAX_QUERIES)
                i++, from = 0; /* that was the row's last */
            else
                from += count - before;
            if (count < MAX_QUERIES && i < num_members)
                continue;
            if (position == 0)
                begin(step, queries, count);
            attend(step, &tile, queries, count);
            count = 0;
        }
    }
}

/* Attend to the other visible keys of one kv head for a block of a row's queries. */
static void attend_block(const Step *step, const Layer *layer, const int32_t *block, int64_t kv_head)
{
    Tile tile;
    Query queries[MAX_QUERIES];
    int64_t row = block[0], count = append(step, layer, row, kv_head, block[1], queries, 0);
    int64_t position = step->shared_keys[row], first = position, stop = queries[count - 1].last + 1;
    if (position == 0) {
        int64_t group = step->num_heads / step->num_kv_heads;
        begin(step, queries, count);
        first = first_seen(layer, step->kv_lens[row] - step->q_lens[row] + block[1] / group);
        position = first - first % TILE; /* whoever else is in the block */
    }
    for (; position < stop; position += TILE) {
        gather(step, layer, row, kv_head, position, first, stop, &tile);
        attend(step, &tile, queries, count);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < step->head_dim; d++)
            queries[i].out[d] /= *queries[i].weight_sum;
}

/* One layer's attention. query, out: [tokens, num_heads, head_dim]; keys, values: [pages, page_size, num_kv_heads,
 * head_dim]; sinks: [num_heads], or NULL. Groups may share keys only if no window hides any. */
void sgl_attend(const Step *step, const float *query, const float *keys, const float *values, float *out,
                const float *sinks, int64_t window)
{
    const Layer layer = {query, keys, values, out, window, sinks};
    int64_t kv_heads = step->num_kv_heads;
#pragma omp parallel if (!step->is_small)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < step->num_groups * kv_heads; i++)
            attend_shared(step, &layer, i / kv_heads, i % kv_heads);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < step->num_blocks * kv_heads; i++)
            attend_block(step, &layer, step->blocks + 2 * (i / kv_heads), i % kv_heads);
    }
}
