/* The subset construction: the states of an automaton are sets of threads, numbered as they are met, and their rows are
 * filled on first use. Does what subsets_reference.py does, for a grammar of which Python tells what is asked for;
 * subsets.py says how. Tables as in tables.py. */
#include "nfa.h"
#include "ends.h"

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The number of the state of the chosen members. */
static int32_t chosen_state(Subsets *s) {
    uint64_t *m = s->chosen.at;
    int64_t number = s->chosen.number, kept = 0;
    if (number > 16) {
        qsort(m, number, sizeof *m, by_value);
    } else {
        for (int64_t i = 1; i < number; i++) {
            uint64_t one = m[i];
            int64_t j = i;
            for (; j && m[j - 1] > one; j--) m[j] = m[j - 1];
            m[j] = one;
        }
    }
    uint32_t hash = 1;
    for (int64_t i = 0; i < number; i++) {
        if (i && m[i] == m[i - 1]) continue;
        m[kept++] = m[i];
        hash = mixed(hash, m[i]);
    }
    index_room(s, &s->by_members);
    FIND(s->by_members, hash, slot, i, s->states.at[i].number == kept && !memcmp(s->members.at + s->states.at[i].members, m, kept * sizeof *m))
    if (slot->item) return slot->item - 1;
    int32_t state = (int32_t)s->num_states;
    if (state >= s->max_states) longjmp(s->out, TOO_MANY);
    if (state >= s->num_rows) longjmp(s->out, ROOM);
    RESERVE(s->members, kept);
    RESERVE(s->unsplit, 1);
    PUT(s->states, (State){s->members.number, (int32_t)kept});
    memcpy(s->members.at + s->members.number, m, kept * sizeof *m);
    s->members.number += kept;
    *slot = (Slot){hash, state + 1}, s->by_members.number++;
    int flags = 0, has_guards = 0;
    for (int64_t i = 0; i < kept; i++) {
        const Thread *t = &s->threads.at[(uint32_t)m[i]];
        flags |= t->flags, has_guards |= t->kind == GUARD;
    }
    for (int64_t c = 0; c < s->num_classes; c++) s->entries[state * s->width + c] = UNKNOWN;
    memset(s->symbols + 2 * (int64_t)state, 255, 2 * sizeof(int32_t)); /* -1: none */
    memset(s->guard_rows + 4 * (int64_t)state, 255, 4 * sizeof(int32_t));
    s->accepting[state] = flags & ACCEPTS;
    s->unique[state] = (flags & READS_UNIQUE) != 0;
    s->has_unique |= s->unique[state];
    if (has_guards) s->unsplit.at[s->unsplit.number++] = state;
    s->num_states++;
    return state;
}

static void choose(Subsets *s, uint64_t origin, int64_t list, int32_t number) {
    RESERVE(s->chosen, number);
    for (int32_t i = 0; i < number; i++) s->chosen.at[s->chosen.number++] = origin << 32 | (uint32_t)s->lists.at[list + i];
}

/* Splits on the lowest limit of the lowest counter: below it every guard takes its `below` threads; at it guards with that
 * limit take `at`, the others stay. */
static void split_guards(Subsets *s) {
    while (s->unsplit.number) {
        int32_t state = s->unsplit.at[s->unsplit.number - 1], sides[2];
        State of = s->states.at[state];
        int32_t counter = NO_COUNTER, limit = 0;
        for (int64_t i = of.members; i < of.members + of.number; i++) {
            const Thread *t = &s->threads.at[(uint32_t)s->members.at[i]];
            if (t->kind != GUARD) continue;
            const Guard *g = &s->guards.at[t->expr];
            if (g->counter < counter || (g->counter == counter && g->limit < limit)) counter = g->counter, limit = g->limit;
        }
        for (int at = 0; at < 2; at++) {
            int64_t pending = s->unsplit.number;
            s->chosen.number = 0;
            for (int64_t i = of.members; i < of.members + of.number; i++) {
                uint64_t member = s->members.at[i];
                const Thread *t = &s->threads.at[(uint32_t)member];
                Guard g = t->kind == GUARD ? s->guards.at[t->expr] : (Guard){0};
                if (t->kind != GUARD || (at && g.limit != limit)) PUT(s->chosen, member);
                else if (at) choose(s, member >> 32, g.at, g.num_at);
                else choose(s, member >> 32, g.below, g.num_below);
            }
            sides[at] = chosen_state(s);
            if (s->unsplit.number > pending) break; /* first what is new */
            if (at) {
                int32_t *row = s->guard_rows + 4 * (int64_t)state;
                row[0] = limit < NEVER_REACHED ? limit : NEVER_REACHED, row[1] = counter, row[2] = sides[0], row[3] = sides[1];
                s->has_guards = 1;
                /* not always the last: its sides may be states of guards that were met before */
                s->unsplit.number--;
            }
        }
    }
}

/* Bytes that a set has in part leave their class. */
static void split_classes(Subsets *s, const Bytes *mask) {
    for (int64_t c = 0, number = s->num_classes; c < number; c++) {
        Bytes apart = both(&s->members_of[c], mask);
        if (is_none(&apart) || is_same(&apart, &s->members_of[c])) continue;
        if (s->num_classes == s->width) longjmp(s->out, ROOM);
        int64_t fresh = s->num_classes;
        for (int64_t i = 0; i < s->num_states; i++) s->entries[i * s->width + fresh] = s->entries[i * s->width + c];
        s->members_of[c] = without(&s->members_of[c], &apart);
        s->members_of[fresh] = apart;
        for (int byte = 0; byte < 256; byte++)
            if (has(&apart, byte)) s->classes[byte] = (uint8_t)fresh;
        s->num_classes++;
    }
}

/* Disjoint sets of bytes, in each of which all go the same way. */
static void find_cells(Subsets *s) {
    s->cells.number = 0;
    for (int64_t i = 0; i < s->state_moves.number; i++) {
        Bytes left = s->state_moves.at[i].mask;
        for (int64_t c = 0, number = s->cells.number; c < number && !is_none(&left); c++) {
            Bytes shared = both(&s->cells.at[c], &left);
            if (is_none(&shared)) continue;
            if (!is_same(&shared, &s->cells.at[c])) {
                Bytes other = without(&s->cells.at[c], &shared);
                PUT(s->cells, other);
                s->cells.at[c] = shared;
            }
            left = without(&left, &shared);
        }
        if (!is_none(&left)) PUT(s->cells, left);
    }
}

/* Where a cell leads; UNKNOWN where that is a bracket, of which Python is asked. */
static int32_t cell_entry(Subsets *s, const Bytes *cell) {
    int byte = lowest(cell), operation = 0, is_bracket = 0;
    int64_t first = s->bracket_moves.number;
    s->chosen.number = 0;
    for (int64_t i = 0; i < s->state_moves.number; i++) {
        const Move *move = &s->state_moves.at[i];
        if (!has(&move->mask, byte)) continue;
        uint64_t origin = (uint32_t)move->origin;
        if (move->kind != STAY || move->number) PUT(s->bracket_moves, (BracketMove){move->origin, move->kind, move->target, 0});
        if (move->kind != STAY) {
            is_bracket = 1;
            continue;
        }
        operation |= move->operation;
        RESERVE(s->chosen, move->number);
        for (int32_t k = 0; k < move->number; k++)
            s->chosen.at[s->chosen.number++] = origin << 32 | (uint32_t)s->entered.at[move->first + k];
    }
    if (is_bracket) {
        PUT(s->bracket_cells, (BracketCell){*cell, first, s->bracket_moves.number - first});
        return UNKNOWN;
    }
    s->bracket_moves.number = first;
    s->work += s->state_moves.number / 8 + s->chosen.number;
    return s->chosen.number ? chosen_state(s) | operation << SHIFT : DEAD;
}

/* Returns DONE, NEEDS (give what is missing, call again), BRACKETS (call again with answers) or how it ran out of room. */
static int64_t expand(Subsets *s, int64_t state, const int32_t *answers) {
    int why = setjmp(s->out);
    if (why) return why;
    split_guards(s);
    int32_t *row = s->entries + state * s->width;
    if (row[0] != UNKNOWN) return DONE;
    State of = s->states.at[state];
    s->needs.number = s->state_moves.number = s->entered.number = s->bracket_cells.number = s->bracket_moves.number = 0;
    for (int64_t i = 0; i < of.number; i++) need_moves(s, (int32_t)(uint32_t)s->members.at[of.members + i]);
    s->needed = s->needs.at, s->num_needed = s->needs.number;
    if (s->num_needed) return NEEDS;
    for (int64_t i = 0; i < of.number; i++) {
        uint64_t member = s->members.at[of.members + i];
        put_moves(s, (int32_t)(uint32_t)member, (int32_t)(member >> 32));
    }
    find_cells(s);
    s->work += s->state_moves.number * s->cells.number / 4;
    int64_t number = 0, num_answered = 0;
    s->cell_entries.number = 0;
    for (int64_t c = 0; c < s->cells.number; c++) {
        Bytes cell = s->cells.at[c];
        int32_t entry = cell_entry(s, &cell);
        if (entry == UNKNOWN && answers) entry = answers[num_answered++];
        if (entry == DEAD) continue;
        int64_t same = 0;
        while (same < number && s->cell_entries.at[same] != entry) same++;
        if (same < number && entry != UNKNOWN) {
            for (int i = 0; i < 4; i++) s->cells.at[same].bits[i] |= cell.bits[i];
        } else {
            PUT(s->cell_entries, entry);
            s->cells.at[number++] = cell;
        }
    }
    split_guards(s);
    s->shown_cells = s->bracket_cells.at, s->shown_moves = s->bracket_moves.at, s->num_shown_cells = s->bracket_cells.number;
    if (s->num_shown_cells && !answers) return BRACKETS;
    for (int64_t c = 0; c < number; c++) split_classes(s, &s->cells.at[c]);
    for (int64_t k = 0; k < s->num_classes; k++) {
        int byte = lowest(&s->members_of[k]);
        row[k] = DEAD;
        for (int64_t c = 0; c < number; c++)
            if (has(&s->cells.at[c], byte)) row[k] = s->cell_entries.at[c];
    }
    return DONE;
}

/* Fill the row of a state. `answers` are where its brackets lead; without, they are asked for. */
int64_t sgl_expand(Subsets *s, int64_t state, const int32_t *answers) {
    s->asked = state;
    return s->why = expand(s, state, answers);
}

/* The same for a walk: returns about how many of its steps that was worth; 0 if Python has to do it. */
int64_t sgl_expand_meanwhile(Subsets *s, int64_t state) {
    s->work = 64;
    return sgl_expand(s, state, 0) == DONE ? s->work : 0;
}

/* The number of a state, or -1 - how the call ended. */
int64_t sgl_state(Subsets *s, const uint64_t *members, int64_t number) {
    int why = setjmp(s->out);
    if (why) return -1 - why;
    split_guards(s);
    s->chosen.number = 0;
    RESERVE(s->chosen, number);
    memcpy(s->chosen.at, members, number * sizeof *members);
    s->chosen.number = number;
    int32_t state = chosen_state(s);
    split_guards(s);
    return state;
}

/* What follows returns the number of what is new, or of what is like it; -1 - how the call ended. */
#define ENTRY int why = setjmp(s->out); if (why) return -1 - why;

int64_t sgl_add_expr(Subsets *s, int64_t nullable, int64_t indented, int64_t is_list) {
    ENTRY
    PUT(s->exprs, (Expr){(int32_t)nullable, (int32_t)indented, 0, 0, NONE, NONE, 0, NONE, (int32_t)is_list, 0, NONE});
    return s->exprs.number - 1;
}

int64_t sgl_add_text(Subsets *s, const uint8_t *text, int64_t length, int64_t tail) {
    ENTRY
    int64_t first = s->texts.number;
    RESERVE(s->texts, length);
    memcpy(s->texts.at + first, text, length);
    s->texts.number += length;
    return text_of(s, first, (int32_t)length, (int32_t)tail);
}

/* Words in order, each with the byte that alone can follow it; `expr` is what stands behind them. Returns the first. */
int64_t sgl_add_words(Subsets *s, const uint8_t *text, const int32_t *lengths, int64_t number, int64_t expr) {
    ENTRY
    int64_t length = 0, first = s->texts.number;
    for (int64_t i = 0; i < number; i++) length += lengths[i];
    RESERVE(s->texts, length);
    RESERVE(s->words, number);
    memcpy(s->texts.at + first, text, length);
    s->texts.number += length;
    for (int64_t i = 0; i < number; first += lengths[i++])
        s->words.at[s->words.number++] = (Word){first, lengths[i], (int32_t)expr, NONE};
    return s->words.number - number;
}

int64_t sgl_add_without(Subsets *s, int64_t expr, int64_t low, int64_t high) {
    ENTRY
    return without_words(s, (Words){(int32_t)expr, (int32_t)low, (int32_t)high, 0});
}

void sgl_give_target(Subsets *s, int64_t word, int64_t target) { s->words.at[word].target = (int32_t)target; }

int64_t sgl_give_arcs(Subsets *s, int64_t expr, const Arc *arcs, int64_t number, int64_t plain) {
    ENTRY
    RESERVE(s->arcs, number);
    memcpy(s->arcs.at + s->arcs.number, arcs, number * sizeof *arcs);
    s->exprs.at[expr].arcs = s->arcs.number, s->exprs.at[expr].num_arcs = (int32_t)number;
    s->exprs.at[expr].plain = (int32_t)plain;
    s->arcs.number += number;
    return 0;
}

int64_t sgl_add_target(Subsets *s, int64_t kind, int64_t operation) {
    ENTRY
    PUT(s->targets, (Target){(int32_t)kind, (int32_t)operation, NONE, 0, NONE});
    return s->targets.number - 1;
}

static int64_t put_list(Subsets *s, const int32_t *threads, int64_t number) {
    RESERVE(s->lists, number);
    memcpy(s->lists.at + s->lists.number, threads, number * sizeof *threads);
    s->lists.number += number;
    return s->lists.number - number;
}

int64_t sgl_give_threads(Subsets *s, int64_t target, const int32_t *threads, int64_t number) {
    ENTRY
    s->targets.at[target].threads = put_list(s, threads, number);
    s->targets.at[target].num_threads = (int32_t)number;
    return 0;
}

int64_t sgl_intern(Subsets *s, int64_t kind, int64_t expr, int64_t target, int64_t depth) {
    ENTRY
    return thread_of(s, (int)kind, (int32_t)expr, (int32_t)target, (int32_t)depth);
}

int64_t sgl_add_thread(Subsets *s, int64_t flags, int64_t plain_limit) {
    ENTRY
    PUT(s->threads, (Thread){OTHER, (int32_t)flags, NONE, NONE, 0, NONE, 0, plain_limit, NONE});
    return s->threads.number - 1;
}

int64_t sgl_add_counted(Subsets *s, int64_t character, int64_t low, int64_t high, int64_t target, int64_t plain_limit) {
    ENTRY
    PUT(s->counted, (Counted){(int32_t)character, (int32_t)low, (int32_t)high, (int32_t)target, plain_limit});
    return s->counted.number - 1;
}

/* A move's `first` is its place in `threads`. */
int64_t sgl_give_moves(Subsets *s, int64_t thread, const Move *moves, int64_t number, const int32_t *threads, int64_t total) {
    ENTRY
    RESERVE(s->moves, number);
    int64_t list = put_list(s, threads, total), first = s->moves.number;
    for (int64_t i = 0; i < number; i++) {
        s->moves.at[first + i] = moves[i];
        s->moves.at[first + i].first += (int32_t)list;
    }
    s->moves.number += number;
    s->threads.at[thread].moves = first, s->threads.at[thread].num_moves = (int32_t)number;
    return 0;
}

int64_t sgl_add_guard(Subsets *s, int64_t counter, int64_t limit, const int32_t *threads, int64_t num_below, int64_t num_at) {
    ENTRY
    RESERVE(s->guards, 1);
    int64_t list = put_list(s, threads, num_below + num_at);
    Guard guard = {(int32_t)counter, limit < NEVER_REACHED ? (int32_t)limit : NEVER_REACHED, (int32_t)num_below, (int32_t)num_at, list, list + num_below};
    PUT(s->threads, (Thread){GUARD, 0, (int32_t)s->guards.number, NONE, 0, 0, 0, NOT_PLAIN, NONE});
    s->guards.at[s->guards.number++] = guard;
    return s->threads.number - 1;
}

/* ' ' to 0x7F but for " and \\, and all bytes of longer characters */
static const Bytes PLAIN = {{0xFFFFFFFB00000000ull, 0xFFFFFFFFEFFFFFFFull, ~0ull, ~0ull}};

static int moves_on_plain(const Subsets *s, const Thread *t) {
    if (t->kind == BLANKS) return 1;
    if (t->kind == KEYS) {
        for (int32_t i = t->expr; i < t->target; i++)
            if (has(&PLAIN, s->texts.at[s->words.at[i].text + t->depth])) return 1;
        return 0;
    }
    if (t->kind == COUNTED && t->expr < 0 && t->depth == COUNTED_OUT) return 0;
    int32_t expr = t->kind == COUNTED && t->expr < 0 ? s->counted.at[t->target].character : t->expr;
    const Expr *e = t->kind == LEXEME || t->kind == COUNTED ? &s->exprs.at[expr] : 0;
    for (int64_t i = 0; i < (e ? e->num_arcs : t->num_moves); i++) {
        Bytes plain = both(e ? &s->arcs.at[e->arcs + i].mask : &s->moves.at[t->moves + i].mask, &PLAIN);
        if (!is_none(&plain)) return 1;
    }
    return 0;
}

/* As SubsetsReference.plain_limit: shows the limit, returns whether one thread is alone. */
int64_t sgl_plain_limit(Subsets *s, int64_t state) {
    State of = s->states.at[state];
    int others_move = 0, number = 0;
    int64_t most = NOT_PLAIN;
    for (int64_t i = of.members; i < of.members + of.number; i++) {
        const Thread *t = &s->threads.at[(uint32_t)s->members.at[i]];
        int plain = t->kind == LEXEME ? s->exprs.at[t->expr].plain : LOOPS;
        int64_t limit = t->kind == LEXEME && plain ? ENDLESS : t->plain_limit;
        if (t->kind == COUNTED && t->expr < 0 && t->depth != COUNTED_OUT) limit = s->counted.at[t->target].plain_limit;
        if (limit == NOT_PLAIN) others_move |= moves_on_plain(s, t);
        else number += plain == LOOPS ? 1 : 2;
        if (limit > most) most = limit;
    }
    s->plain_limit = others_move && most < ENDLESS ? NOT_PLAIN : most;
    return number == 1 && !others_move;
}

/* What they do in a state that is expanded, as walk.c has it. */
int64_t sgl_plain(Subsets *s, int64_t state) {
    int is_alone = (int)sgl_plain_limit(s, state);
    if (s->plain_limit < ENDLESS) return 1;
    return is_alone && s->entries[state * s->width + s->classes[' ']] == state ? 3 : 2;
}

/* Whether a state is nothing but one thread inside a list of words. */
int64_t sgl_is_list(Subsets *s, int64_t state) {
    State of = s->states.at[state];
    if (of.number != 1) return 0;
    const Thread *t = &s->threads.at[(uint32_t)s->members.at[of.members]];
    return t->kind == LEXEME && s->exprs.at[t->expr].is_list;
}

/* Show the members of a state, a thread, the text of an expression or the words it is without. */
void sgl_show_members(Subsets *s, int64_t state) {
    s->member = s->members.at + s->states.at[state].members, s->num_members = s->states.at[state].number;
}

void sgl_show_thread(Subsets *s, int64_t thread) {
    const Thread *t = &s->threads.at[thread];
    s->kind = t->kind, s->expr = t->expr, s->target = t->target, s->length = t->depth;
}

void sgl_show_text(Subsets *s, int64_t expr) {
    const Expr *e = &s->exprs.at[expr];
    s->text = s->texts.at + e->text, s->length = e->length, s->expr = e->tail;
}

void sgl_show_words(Subsets *s, int64_t expr) {
    Words w = s->word_sets.at[s->exprs.at[expr].words];
    s->expr = w.expr, s->kind = w.low, s->target = w.high, s->length = w.depth;
}

Subsets *sgl_new(void) {
    Subsets *s = calloc(1, sizeof *s);
    if (s) memset(&s->members_of[0], 255, sizeof(Bytes));
    if (s) s->num_classes = 1;
    return s;
}

void sgl_free(Subsets *s) {
    void *all[] = {s->exprs.at, s->arcs.at, s->targets.at, s->threads.at, s->lists.at, s->moves.at, s->state_moves.at,
                   s->guards.at, s->states.at, s->members.at, s->chosen.at, s->entered.at, s->unsplit.at, s->texts.at,
                   s->needs.at, s->bracket_cells.at, s->bracket_moves.at, s->cells.at, s->cell_entries.at,
                   s->by_members.slots, s->by_parts.slots, s->by_text.slots, s->word_sets.at, s->words.at, s->counted.at,
                   s->by_words.slots, s};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}
