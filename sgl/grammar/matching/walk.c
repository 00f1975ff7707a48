/* Which tokens may follow at a place: one walk over a trie of the vocabulary in depth-first order. Tables as in tables.py,
 * the trie as in trie.py; walk.py fills in a Walk, whose fields its _Walk lists in the same order. walk_reference.py does the
 * same in NumPy; tests/test_grammar_walk.py holds both to the same bits. */
#include <stdint.h>

enum { DEAD = -1, UNKNOWN = -2, TARGET = (1 << 24) - 1, PUSH = 1 << 24, POP = 1 << 25, SHIFT = 26 };
enum { INC_CHAR = 1, RESET_CHAR = 2, INC_ITEM = 4 };
enum { FIXED = -1 };                                /* a count that does not go on from one at the place */
enum { DONE, EXPAND, RETURN, FRAMES, GROUPS, TIME, PLAIN }; /* why sgl_walk returns; all but DONE are called again */
enum { ASK, NONE, ALLOWED, STAYS };                         /* what plain characters do in a state, see Walker */
static const int64_t ENDLESS = 1ll << 60;
enum { FEW = 2 };

typedef struct { int32_t end, token, depth_byte; } Node;
/* top: frame opened on the way, or -1 - i with i frames of the place closed; source: of items, 0 the place, i its i-th frame. */
typedef struct { int32_t state, top, chars, chars_source, items, items_source; } At;
typedef struct { int32_t below, symbol, items, items_source, child, sibling; } Frame;
typedef struct { int32_t top, chars, items, token, next; } Group;

typedef struct {
    const int32_t *entries, *symbols, *guards, *returns;
    const uint8_t *classes;
    int64_t width, results;
    const Node *nodes, *rest;
    /* by node, or 0: plain tokens before it, and the same node in the trie of the rest; all plain tokens by node */
    const int32_t *plain_before, *rest_of, *plain_tokens;
    int32_t *plain; /* by state: what plain characters do there */
    const int32_t *row_of; /* by node: the mask of the plain tokens below it, or -1 */
    const uint32_t *rows;
    const int32_t (*starts)[3];  /* from node, up to node, characters read before */
    const int64_t (*regions)[2]; /* a start's state: that of the first with a limit above its count of characters, if any */
    const int32_t (*stack)[2];   /* the place's frames from the top: symbol, items */
    int64_t words, num_starts, num_regions, num_stack, chars, items;
    uint32_t *mask;
    int32_t *seen;     /* by state: 0, 1 if it was come to, 2 + its last group */
    int32_t *group_of; /* by token, or 0 */
    Frame *frames;
    Group *groups;
    int64_t (*bounds)[2]; /* counts at the place between which all goes the same: characters, items of its frames */
    At *at;               /* by depth */
    int64_t max_frames, num_frames, max_groups, num_groups, num_closed;
    int32_t on_place, unused; /* 1 + the last of the frames opened on the place's own, or 0 */
    int64_t next_start, node, end, back, back_end; /* behind a walk through the rest, if back is not 0 */
    int64_t state, symbol, result; /* what is asked for */
    int64_t fresh, low, high, num_rows; /* whether the walk is to begin; the plan's counts of characters; of states */
    int64_t (*expand)(void *, int64_t), (*classify_plain)(void *, int64_t); /* of subsets.c, or 0 */
    void *subsets;
} Walk;

/* Fill the row of a state, which is worth so many steps; 0 if that cannot be had here. */
static int64_t expanded(Walk *w, int32_t state) { return w->expand ? w->expand(w->subsets, state) : 0; }

/* The state that a guard stands for; notes for which counts at the place that is so. */
static int32_t land(Walk *w, const At *a, int32_t state) {
    for (const int32_t *g; (g = w->guards + 4 * (int64_t)state)[0] >= 0;) {
        int64_t count = g[1] ? a->items : a->chars;
        int is_at = count >= g[0], source = g[1] ? a->items_source : a->chars_source;
        if (source != FIXED) {
            int64_t *bounds = w->bounds[g[1] ? 1 + source : 0];
            int64_t base = !g[1] ? w->chars : source ? w->stack[source - 1][1] : w->items;
            int64_t turn = g[0] - count + base;
            if (is_at && turn > bounds[0]) bounds[0] = turn;
            if (!is_at && turn - 1 < bounds[1]) bounds[1] = turn - 1;
        }
        state = is_at ? g[3] : g[2];
    }
    return state;
}

/* The frame pushed on top of another, made once; -1: there is no room. */
static int32_t opened(Walk *w, const At *a, int32_t symbol) {
    int32_t *first = a->top >= 0 ? &w->frames[a->top].child : &w->on_place; /* 1 + its number, or 0 */
    for (int32_t i = *first; i; i = w->frames[i - 1].sibling) {
        const Frame *f = &w->frames[i - 1];
        if (f->below == a->top && f->symbol == symbol && f->items == a->items && f->items_source == a->items_source) return i - 1;
    }
    if (w->num_frames == w->max_frames) return -1;
    w->frames[w->num_frames] = (Frame){a->top, symbol, a->items, a->items_source, 0, *first};
    *first = (int32_t)++w->num_frames;
    return *first - 1;
}

/* The group of the tokens that lead to one place, made once; -1: there is no room. */
static int32_t group(Walk *w, const At *a, int32_t token) {
    int32_t last = w->seen[a->state] - 2;
    for (int32_t i = last; i >= 0; i = w->groups[i].next) {
        const Group *g = &w->groups[i];
        if (g->top == a->top && g->chars == a->chars && g->items == a->items) return i;
    }
    if (w->num_groups == w->max_groups) return -1;
    w->groups[w->num_groups] = (Group){a->top, a->chars, a->items, token, last < 0 ? -1 : last};
    w->seen[a->state] = (int32_t)w->num_groups + 2;
    return (int32_t)w->num_groups++;
}

static void begin(Walk *w) {
    for (int64_t i = 0; i < w->num_rows; i++) w->seen[i] = 0;
    for (int64_t i = 1; i < w->num_stack + 2; i++) w->bounds[i][0] = 0, w->bounds[i][1] = ENDLESS;
    w->bounds[0][0] = w->low, w->bounds[0][1] = w->high;
    w->num_frames = w->num_groups = w->num_closed = w->on_place = 0;
    w->next_start = w->node = w->end = w->back = w->fresh = 0;
}

/* Walk on, for `steps` nodes at most. */
int64_t sgl_walk(Walk *w, int64_t steps) {
    if (w->fresh) begin(w);
    int64_t i = w->node, end = w->end, why = DONE;
    for (;;) {
        if (i == end && w->back) {
            i = w->back, end = w->back_end, w->back = 0;
            continue;
        }
        if (i == end) {
            if (w->next_start == w->num_starts) break;
            const int32_t *from = w->starts[w->next_start++];
            int64_t count = w->chars + from[2], r = 0;
            while (r < w->num_regions && w->regions[r][0] <= count) r++;
            if (r == w->num_regions) continue;
            i = from[0], end = from[1];
            if (i == end) continue;
            w->at[(w->nodes[i].depth_byte >> 8) - 1] = (At){(int32_t)w->regions[r][1], -1, (int32_t)count, 0, (int32_t)w->items, 0};
        }
        if (--steps < 0) { why = TIME; break; }
        Node node = (w->back ? w->rest : w->nodes)[i];
        At *before = &w->at[(node.depth_byte >> 8) - 1], *a = before + 1;
        uint8_t byte = node.depth_byte & 255;
        int32_t entry = w->entries[before->state * w->width + w->classes[byte]];
        if (entry < 0) {
            if (entry == UNKNOWN) {
                int64_t work = expanded(w, before->state);
                steps -= work;
                if (work) continue;
                w->state = before->state, why = EXPAND;
                break;
            }
            i = node.end;
            continue;
        }
        *a = *before;
        a->state = entry & TARGET;
        if (entry > TARGET) {
            if (entry & PUSH) {
                a->top = opened(w, before, w->symbols[2 * (int64_t)before->state + (byte == '[')]);
                if (a->top < 0) { why = FRAMES; break; }
                a->items = 0, a->items_source = FIXED;
            } else if (entry & POP) {
                int32_t closed = -1 - a->top, symbol, back;
                symbol = closed < 0 ? w->frames[a->top].symbol : w->stack[closed][0];
                back = w->returns[symbol * w->results + a->state];
                if (back == UNKNOWN) { w->symbol = symbol, w->result = a->state, why = RETURN; break; }
                a->state = back;
                if (closed < 0) {
                    Frame *f = &w->frames[a->top];
                    a->top = f->below, a->items = f->items, a->items_source = f->items_source;
                } else {
                    a->top--, a->items = w->stack[closed][1], a->items_source = closed + 1;
                    if (closed + 1 > w->num_closed) w->num_closed = closed + 1;
                }
            } else {
                int operation = entry >> SHIFT;
                if (operation & RESET_CHAR) a->chars = 0, a->chars_source = FIXED;
                a->chars += operation & INC_CHAR, a->items += (operation & INC_ITEM) != 0;
                a->state = land(w, a, a->state);
            }
        }
        if (!w->seen[a->state]) w->seen[a->state] = 1;
        if (node.token >= 0) {
            if (w->group_of) {
                int32_t found = group(w, a, node.token);
                if (found < 0) { why = GROUPS; break; }
                w->group_of[node.token] = found;
            }
            w->mask[node.token >> 5] |= 1u << (node.token & 31);
        }
        int32_t next = i + 1, many = 0;
        if (w->plain_before && !w->back) many = w->plain_before[node.end] - w->plain_before[next];
        if (many > FEW) {
            int32_t plain = w->plain[a->state];
            if (plain == ASK) {
                int32_t blank = w->entries[a->state * w->width + w->classes[' ']]; /* a plain character */
                w->state = a->state;
                if (blank == UNKNOWN) {
                    steps -= expanded(w, a->state);
                    blank = w->entries[a->state * w->width + w->classes[' ']];
                }
                if (blank == UNKNOWN) { why = EXPAND; break; }
                if (blank != DEAD && !w->classify_plain) { why = PLAIN; break; }
                plain = w->plain[a->state] = blank == DEAD ? NONE : (int32_t)w->classify_plain(w->subsets, a->state);
            }
            if (plain == STAYS || (plain == ALLOWED && !w->group_of)) {
                const int32_t *tokens = w->plain_tokens + w->plain_before[next];
                int32_t found = w->group_of ? group(w, a, tokens[0]) : 0, same = w->rest_of[i];
                if (found < 0) { why = GROUPS; break; }
                const uint32_t *row = w->row_of[i] < 0 ? 0 : w->rows + w->row_of[i] * w->words;
                for (int64_t k = 0; row && k < w->words; k++) w->mask[k] |= row[k];
                for (int32_t k = 0; !row && k < many; k++) w->mask[tokens[k] >> 5] |= 1u << (tokens[k] & 31);
                if (w->group_of) for (int32_t k = 0; k < many; k++) w->group_of[tokens[k]] = found;
                if (same < 0) { i = node.end; continue; }
                w->back = node.end, w->back_end = end;
                i = same + 1, end = w->rest[same].end;
                continue;
            }
        }
        i = next;
    }
    w->node = i, w->end = end;
    return why;
}
