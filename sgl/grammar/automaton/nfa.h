/* The nondeterministic places of a grammar, as nfa.py has them: what Python tells of expressions, nodes and threads, and
 * the moves of threads. subsets.c runs sets of them. */
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEAD = -1, UNKNOWN = -2, SHIFT = 26, INC_CHAR = 1, RESET_CHAR = 2, MAX_BLANKS = 64, NEVER_REACHED = 1 << 30 };
enum { NO_COUNTER = 2 }; /* behind those of characters and of items */
enum { DONE, NEEDS, BRACKETS, ROOM, TOO_MANY, NO_MEMORY };  /* how a call ended; but for DONE it is made again */
enum { STAY, PUSH, POP };                                   /* of a move */
enum { NODE, OPENING, CLOSING };                            /* of a target */
enum { LEXEME, BLANKS, GUARD, KEYS, COUNTED, GUARDED, OTHER };                      /* of a thread */
enum { ACCEPTS = 1, READS_UNIQUE = 2 };                     /* flags of one */
enum { COUNTED_OUT = 2 };                                   /* region of a counted text: no more characters */
enum { LOOPS = 2 };                                         /* plain characters lead from an expression to itself */
enum { ARCS, THREADS, MOVES, BEHIND, SHORTEST, BEHIND_TARGET, FROM_THREAD };                              /* what is needed, of an expression, a target, a thread, a
                                                             * word */
enum { LONG_TEXT = 64, NONE = -1, NOT_PLAIN = -1 };
static const int64_t ENDLESS = 1ll << 60;

typedef struct { uint64_t bits[4]; } Bytes;                        /* a set of them */
typedef struct { Bytes mask; int64_t rest; } Arc;                  /* rest: an expression */
typedef struct { Bytes mask; int32_t kind, operation, first, number, target, origin; } Move; /* threads; or a target */
/* One with a length is a text before its tail; one with `words` is another one without what begins with a word. All numbers of other things are NONE where there is none. */
typedef struct { int32_t nullable, indented, text, length, tail, num_arcs, plain, words, is_list; int64_t arcs, shortest; } Expr;
typedef struct { int32_t expr, low, high, depth; } Words; /* they have been read up to the depth */
typedef struct { int64_t text; int32_t length, expr, target; } Word; /* of a declared key: what stands behind it */
typedef struct { int32_t kind, operation, num_threads; int64_t threads, most; } Target;
typedef struct { int32_t kind, flags, expr, target, depth, num_moves; int64_t moves, plain_limit, most; } Thread; /* expr of a guard: its number; target: the
 * blanks that it stands behind, if any */
typedef struct { int32_t character, low, high, target; int64_t plain_limit; } Counted; /* expressions; high may be NONE */
typedef struct { int32_t counter, limit, num_below, num_at; int64_t below, at; } Guard;
typedef struct { int64_t members; int32_t number; } State;
typedef struct { int32_t what, which; } Need;
typedef struct { Bytes mask; int64_t first, number; } BracketCell; /* its moves among `bracket_moves` */
typedef struct { int32_t origin, kind, target, unused; } BracketMove;
typedef struct { uint32_t hash; int32_t item; } Slot; /* item: 1 + its number, or 0 */
typedef struct { Slot *slots; int64_t size, number; } Index;

#define POOL(T) struct { T *at; int64_t number, size; }

typedef struct {
    /* known to subsets.py, in this order */
    int32_t *entries, *symbols, *guard_rows;
    uint8_t *accepting, *unique, *classes;
    int64_t num_rows, width, max_states, num_states, num_classes, has_guards, has_unique;
    Need *needed;
    int64_t num_needed;
    BracketCell *shown_cells;
    BracketMove *shown_moves;
    int64_t num_shown_cells;
    uint64_t *member; /* of the state that was asked for: origin << 32 | thread */
    int64_t num_members;
    int32_t kind, expr, target, length; /* of the thread or the expression that was asked for */
    const uint8_t *text;
    int64_t plain_limit, asked, why; /* the row that was asked for last, and how that ended */
    /* known here alone */
    int64_t work;
    jmp_buf out;
    Bytes members_of[256]; /* of a class */
    POOL(Expr) exprs;
    POOL(Arc) arcs;
    POOL(Words) word_sets;
    POOL(Word) words;
    POOL(Target) targets;
    POOL(Thread) threads;
    POOL(int32_t) lists; /* of threads */
    POOL(Move) moves, state_moves; /* of all threads; of the state that is expanded */
    POOL(Guard) guards;
    POOL(Counted) counted;
    POOL(State) states;
    POOL(uint64_t) members, chosen;
    POOL(int32_t) entered, unsplit;
    POOL(uint8_t) texts;
    POOL(Need) needs;
    POOL(BracketCell) bracket_cells;
    POOL(BracketMove) bracket_moves;
    POOL(Bytes) cells;
    POOL(int32_t) cell_entries;
    Index by_members, by_parts, by_text, by_words;
} Subsets;

/* Room for so many more; nothing has changed where there is none. */
static void *more(Subsets *s, void *at, int64_t *size, int64_t wanted, size_t each) {
    int64_t larger = *size ? *size : 16;
    while (larger < wanted) larger *= 2;
    void *found = realloc(at, larger * each);
    if (!found) longjmp(s->out, NO_MEMORY);
    *size = larger;
    return found;
}
#define RESERVE(p, n) do { if ((p).number + (n) > (p).size) (p).at = more(s, (p).at, &(p).size, (p).number + (n), sizeof *(p).at); } while (0)
#define PUT(p, ...) do { RESERVE(p, 1); (p).at[(p).number++] = __VA_ARGS__; } while (0)

static uint32_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
    return (uint32_t)(hash >> 32 ^ hash);
}

static void index_room(Subsets *s, Index *x) {
    if (2 * (x->number + 1) < x->size) return;
    int64_t size = x->size ? 2 * x->size : 64;
    Slot *slots = calloc(size, sizeof *slots);
    if (!slots) longjmp(s->out, NO_MEMORY);
    for (int64_t i = 0; i < x->size; i++) {
        if (!x->slots[i].item) continue;
        int64_t at = x->slots[i].hash & (size - 1);
        while (slots[at].item) at = (at + 1) & (size - 1);
        slots[at] = x->slots[i];
    }
    free(x->slots);
    x->slots = slots, x->size = size;
}

/* The slot of what is equal, or the free one for it. */
#define FIND(x, h, slot, i, equal) \
    Slot *slot; \
    for (int64_t at_ = (h) & ((x).size - 1);; at_ = (at_ + 1) & ((x).size - 1)) { \
        slot = &(x).slots[at_]; \
        int32_t i = slot->item - 1; \
        if (i < 0 || (slot->hash == (h) && (equal))) break; \
    }

static int has(const Bytes *set, int byte) { return set->bits[byte >> 6] >> (byte & 63) & 1; }
static int is_none(const Bytes *set) { return !(set->bits[0] | set->bits[1] | set->bits[2] | set->bits[3]); }
static int is_same(const Bytes *a, const Bytes *b) { return !memcmp(a, b, sizeof *a); }
static int lowest(const Bytes *set) {
    for (int i = 0; i < 4; i++)
        if (set->bits[i]) return 64 * i + __builtin_ctzll(set->bits[i]);
    return NONE;
}
static Bytes both(const Bytes *a, const Bytes *b) {
    Bytes found;
    for (int i = 0; i < 4; i++) found.bits[i] = a->bits[i] & b->bits[i];
    return found;
}
static Bytes without(const Bytes *a, const Bytes *b) {
    Bytes found;
    for (int i = 0; i < 4; i++) found.bits[i] = a->bits[i] & ~b->bits[i];
    return found;
}

/* One of keys: among the words from expr up to target, read up to a depth. A counted one: the rest of a character or
 * NONE, which text, and its region; one that is guarded only owns the guard there. */
static int32_t thread_of(Subsets *s, int kind, int32_t expr, int32_t target, int32_t depth) {
    index_room(s, &s->by_parts);
    uint32_t hash = mixed(mixed((uint64_t)depth << 8 | kind, (uint32_t)expr), (uint32_t)target);
    FIND(s->by_parts, hash, slot, i, s->threads.at[i].kind == kind && s->threads.at[i].expr == expr && s->threads.at[i].target == target && s->threads.at[i].depth == depth)
    if (!slot->item) {
        PUT(s->threads, (Thread){kind, 0, expr, target, depth, 0, 0, NOT_PLAIN, NONE});
        *slot = (Slot){hash, (int32_t)s->threads.number}, s->by_parts.number++;
    }
    return slot->item - 1;
}

/* The expression of a text before another one. */
static int32_t text_of(Subsets *s, int64_t text, int32_t length, int32_t tail) {
    if (!length) return tail;
    uint32_t hash = mixed(length, (uint32_t)tail);
    if (length <= LONG_TEXT) {
        for (int32_t i = 0; i < length; i++) hash = mixed(hash, s->texts.at[text + i]);
        index_room(s, &s->by_text);
        FIND(s->by_text, hash, slot, i, s->exprs.at[i].length == length && s->exprs.at[i].tail == tail && !memcmp(s->texts.at + s->exprs.at[i].text, s->texts.at + text, length))
        if (!slot->item) {
            PUT(s->exprs, (Expr){0, NONE, (int32_t)text, length, tail, NONE, 0, NONE, 0, 0, NONE});
            *slot = (Slot){hash, (int32_t)s->exprs.number}, s->by_text.number++;
        }
        return slot->item - 1;
    }
    PUT(s->exprs, (Expr){0, NONE, (int32_t)text, length, tail, NONE, 0, NONE, 0, 0, NONE});
    return (int32_t)s->exprs.number - 1;
}

static int32_t without_words(Subsets *s, Words w) {
    index_room(s, &s->by_words);
    uint32_t hash = mixed(mixed((uint32_t)w.expr, (uint32_t)w.low), (uint64_t)w.high << 32 | (uint32_t)w.depth);
    FIND(s->by_words, hash, slot, i, !memcmp(&s->word_sets.at[s->exprs.at[i].words], &w, sizeof w))
    if (!slot->item) {
        RESERVE(s->word_sets, 1);
        PUT(s->exprs, (Expr){0, NONE, 0, 0, NONE, NONE, 0, (int32_t)s->word_sets.number, 0, 0, NONE});
        s->word_sets.at[s->word_sets.number++] = w;
        *slot = (Slot){hash, (int32_t)s->exprs.number}, s->by_words.number++;
    }
    return slot->item - 1;
}

/* Up to where words have the byte of the first one behind the depth. */
static int32_t alike(const Subsets *s, int32_t low, int32_t high, int32_t depth) {
    int byte = s->texts.at[s->words.at[low].text + depth];
    while (++low < high && s->texts.at[s->words.at[low].text + depth] == byte) continue;
    return low;
}

static Bytes only(int byte) {
    Bytes found = {{0}};
    found.bits[byte >> 6] = 1ull << (byte & 63);
    return found;
}

/* The arcs of an expression without words: its own, but where words go on. */
static void find_arcs(Subsets *s, int32_t expr) {
    Words w = s->word_sets.at[s->exprs.at[expr].words];
    Expr whole = s->exprs.at[w.expr];
    Bytes near = {{0}};
    int64_t first = s->arcs.number;
    for (int32_t low = w.low, high; low < w.high; low = high) {
        Word word = s->words.at[low];
        int byte = s->texts.at[word.text + w.depth], rest = NONE;
        high = alike(s, low, w.high, w.depth);
        near.bits[byte >> 6] |= 1ull << (byte & 63);
        for (int32_t i = 0; i < whole.num_arcs; i++)
            if (has(&s->arcs.at[whole.arcs + i].mask, byte)) rest = (int32_t)s->arcs.at[whole.arcs + i].rest;
        if (rest < 0 || word.length == w.depth + 1) continue; /* a whole word */
        Arc arc = {only(byte), without_words(s, (Words){rest, low, high, w.depth + 1})};
        PUT(s->arcs, arc);
    }
    for (int32_t i = 0; i < whole.num_arcs; i++) {
        Arc arc = s->arcs.at[whole.arcs + i];
        arc.mask = without(&arc.mask, &near);
        if (!is_none(&arc.mask)) PUT(s->arcs, arc);
    }
    s->exprs.at[expr].arcs = first, s->exprs.at[expr].num_arcs = (int32_t)(s->arcs.number - first);
}

/* Put the threads at the start of a lexeme among the entered. */
static void enter(Subsets *s, int32_t expr, int32_t target) {
    if (expr) PUT(s->entered, thread_of(s, LEXEME, expr, target, 0)); /* the first expression is of the empty text */
    const Target *t = &s->targets.at[target];
    if (t->kind != NODE || !s->exprs.at[expr].nullable) return;
    RESERVE(s->entered, t->num_threads);
    memcpy(s->entered.at + s->entered.number, s->lists.at + t->threads, t->num_threads * sizeof(int32_t));
    s->entered.number += t->num_threads;
}

static void need(Subsets *s, int32_t what, int32_t which) { PUT(s->needs, (Need){what, which}); }

static void need_start(Subsets *s, int32_t expr, int32_t target) {
    const Target *t = &s->targets.at[target];
    if (s->exprs.at[expr].nullable && t->kind == NODE && t->num_threads < 0) need(s, THREADS, target);
}

/* Whether the arcs of an expression are known; else they are asked for. */
static int has_arcs(Subsets *s, int32_t expr) {
    Expr e = s->exprs.at[expr];
    if (e.num_arcs >= 0) return 1;
    if (e.length) {
        Arc arc = {only(s->texts.at[e.text]), text_of(s, e.text + 1, e.length - 1, e.tail)};
        PUT(s->arcs, arc);
        s->exprs.at[expr].arcs = s->arcs.number - 1, s->exprs.at[expr].num_arcs = 1;
    } else if (e.words >= 0) {
        if (!has_arcs(s, s->word_sets.at[e.words].expr)) return 0;
        find_arcs(s, expr);
    } else {
        need(s, ARCS, expr);
        return 0;
    }
    return 1;
}

/* Ask for what a thread's moves are made of. */
static void need_moves(Subsets *s, int32_t number) {
    Thread t = s->threads.at[number];
    if (t.kind == OTHER && t.num_moves < 0) need(s, MOVES, number);
    if (t.kind == BLANKS) need_start(s, t.expr, t.target);
    if (t.kind == KEYS)
        for (int32_t low = t.expr, high; low < t.target; low = high) {
            high = alike(s, low, t.target, t.depth);
            if (high > low + 1) continue;
            Word word = s->words.at[low];
            if (word.target < 0) need(s, BEHIND, low);
            else if (word.length == t.depth + 1) need_start(s, word.expr, word.target);
        }
    if (t.kind == COUNTED) {
        has_arcs(s, t.expr < 0 ? s->counted.at[t.target].character : t.expr);
        need_start(s, 0, s->counted.at[t.target].target);
    }
    if (t.kind != LEXEME || !has_arcs(s, t.expr)) return;
    Expr e = s->exprs.at[t.expr];
    for (int64_t i = e.arcs; i < e.arcs + e.num_arcs; i++) {
        int32_t rest = (int32_t)s->arcs.at[i].rest, indented = s->exprs.at[rest].indented;
        need_start(s, indented < 0 ? rest : indented, t.target);
    }
}

static void put_lexeme_move(Subsets *s, Bytes mask, int32_t rest, int32_t target, int32_t origin) {
    const Target *t = &s->targets.at[target];
    int32_t first = (int32_t)s->entered.number;
    Move move = {mask, STAY, 0, first, 0, target, origin};
    if (!rest && t->kind != NODE) {
        move.kind = t->kind == OPENING ? PUSH : POP;
    } else {
        Expr e = s->exprs.at[rest];
        if (t->kind == NODE && e.nullable) move.operation = t->operation;
        if (e.indented >= 0) {
            move.operation |= RESET_CHAR;
            PUT(s->entered, thread_of(s, BLANKS, e.indented, target, 0));
            rest = e.indented;
        }
        enter(s, rest, target);
        move.number = (int32_t)s->entered.number - first;
    }
    PUT(s->state_moves, move);
}

/* The guard of a count behind which there are the entered threads from `first` up to `at` below a limit, and the rest at
 * it. Made once for its owner. */
static int32_t guard_of(Subsets *s, int32_t owner, int32_t limit, int64_t first, int64_t at) {
    if (!s->threads.at[owner].num_moves) {
        int64_t number = s->entered.number - first, list = s->lists.number;
        RESERVE(s->lists, number);
        RESERVE(s->guards, 1);
        RESERVE(s->threads, 1);
        memcpy(s->lists.at + list, s->entered.at + first, number * sizeof(int32_t));
        s->lists.number += number;
        s->guards.at[s->guards.number++] = (Guard){0, limit, (int32_t)(at - first), (int32_t)(number + first - at), list, list + at - first};
        s->threads.at[s->threads.number++] = (Thread){GUARD, 0, (int32_t)s->guards.number - 1, owner, 0, 0, 0, NOT_PLAIN, NONE};
        s->threads.at[owner].num_moves = 1, s->threads.at[owner].moves = s->threads.number - 1;
    }
    s->entered.number = first;
    return (int32_t)s->threads.at[owner].moves;
}

/* Put the threads among the entered that stand in a counted text with `rest` of a character to come. */
static void enter_counted(Subsets *s, int32_t rest, int32_t counted, int region) {
    if (rest || region != COUNTED_OUT) PUT(s->entered, thread_of(s, COUNTED, rest ? rest : NONE, counted, region));
    if (!rest && region) enter(s, 0, s->counted.at[counted].target);
}

static void put_counted_moves(Subsets *s, Thread t, int32_t origin) {
    Counted text = s->counted.at[t.target];
    if (t.expr < 0 && t.depth == COUNTED_OUT) return;
    Expr e = s->exprs.at[t.expr < 0 ? text.character : t.expr];
    int32_t limit = t.expr >= 0 ? NONE : t.depth ? text.high : text.low;
    int at_limit = text.high >= 0 && limit >= text.high ? COUNTED_OUT : limit >= text.low;
    for (int64_t i = e.arcs; i < e.arcs + e.num_arcs; i++) {
        Arc arc = s->arcs.at[i];
        int32_t rest = (int32_t)arc.rest, first = (int32_t)s->entered.number;
        enter_counted(s, rest, t.target, t.depth);
        if (limit >= 0) {
            int64_t at = s->entered.number;
            enter_counted(s, rest, t.target, at_limit);
            int32_t guard = guard_of(s, thread_of(s, GUARDED, rest, t.target, t.depth), limit, first, at);
            PUT(s->entered, guard);
        }
        PUT(s->state_moves, (Move){arc.mask, STAY, limit < 0 ? 0 : INC_CHAR, first, (int32_t)s->entered.number - first, NONE, origin});
    }
}

static void put_moves(Subsets *s, int32_t number, int32_t origin) {
    Thread t = s->threads.at[number];
    if (t.kind == LEXEME) {
        Expr e = s->exprs.at[t.expr];
        for (int64_t i = e.arcs; i < e.arcs + e.num_arcs; i++)
            put_lexeme_move(s, s->arcs.at[i].mask, (int32_t)s->arcs.at[i].rest, t.target, origin);
    } else if (t.kind == COUNTED) {
        put_counted_moves(s, t, origin);
    } else if (t.kind == KEYS) {
        for (int32_t low = t.expr, high; low < t.target; low = high) {
            Word word = s->words.at[low];
            int32_t first = (int32_t)s->entered.number;
            high = alike(s, low, t.target, t.depth);
            if (high == low + 1)
                enter(s, text_of(s, word.text + t.depth + 1, word.length - t.depth - 1, word.expr), word.target);
            else
                PUT(s->entered, thread_of(s, KEYS, low, high, t.depth + 1));
            Bytes mask = only(s->texts.at[word.text + t.depth]);
            PUT(s->state_moves, (Move){mask, STAY, 0, first, (int32_t)s->entered.number - first, NONE, origin});
        }
    } else if (t.kind == BLANKS) {
        Bytes mask = {{1ull << ' ' | 1ull << '\t'}};
        int64_t first = s->entered.number;
        PUT(s->entered, number);
        enter(s, t.expr, t.target);
        int64_t at = s->entered.number;
        enter(s, t.expr, t.target);
        int32_t guard = guard_of(s, number, MAX_BLANKS, first, at);
        PUT(s->entered, guard);
        PUT(s->state_moves, (Move){mask, STAY, INC_CHAR, (int32_t)s->entered.number - 1, 1, NONE, origin});
    } else {
        for (int64_t i = t.moves; i < t.moves + t.num_moves; i++) {
            Move move = s->moves.at[i];
            int64_t list = move.first;
            move.first = (int32_t)s->entered.number, move.origin = origin;
            RESERVE(s->entered, move.number);
            memcpy(s->entered.at + move.first, s->lists.at + list, move.number * sizeof(int32_t));
            s->entered.number += move.number;
            PUT(s->state_moves, move);
        }
    }
}
