/* How many bytes suffice to end the frame that a state stands in, whatever was counted there; as shortest_end.py finds it
 * for threads and nodes, of which Python tells where they are no mere sum. */
static const int64_t MOST = 1ll << 60; /* larger numbers are taken for this one */

static int64_t added(int64_t a, int64_t b) { return a < 0 || b < 0 ? NONE : a + b < MOST ? a + b : MOST; }

static int64_t asked(Subsets *s, int32_t what, int32_t which, int64_t known) {
    if (known < 0) need(s, what, which);
    return known;
}

/* The length of an expression's shortest string; here and below NONE is not known yet. */
static int64_t shortest(Subsets *s, int32_t expr) {
    Expr e = s->exprs.at[expr];
    if (e.shortest < 0 && e.length) e.shortest = s->exprs.at[expr].shortest = added(e.length, shortest(s, e.tail));
    return e.length ? e.shortest : asked(s, SHORTEST, expr, e.shortest);
}

static int64_t most_behind(Subsets *s, int32_t target) {
    const Target *t = &s->targets.at[target];
    return t->kind == CLOSING ? 0 : asked(s, BEHIND_TARGET, target, t->most);
}

static int64_t most_of(Subsets *s, int32_t number) {
    Thread t = s->threads.at[number];
    if (t.most >= 0) return t.most;
    if ((t.kind == LEXEME || t.kind == BLANKS) && s->targets.at[t.target].kind != OPENING) {
        t.most = added(shortest(s, t.expr), most_behind(s, t.target));
    } else if (t.kind == COUNTED) {
        Counted text = s->counted.at[t.target];
        int64_t each = shortest(s, text.character), all;
        if (__builtin_mul_overflow(each, text.low, &all) || all > MOST) all = MOST;
        if (each < 0) all = NONE;
        t.most = added(added(t.expr < 0 ? 0 : shortest(s, t.expr), all), most_behind(s, text.target));
    } else {
        need(s, FROM_THREAD, number);
    }
    return s->threads.at[number].most = t.most;
}

/* Of each state, into `found`: from whichever thread goes on, or, `within`, from the nearest of each origin. */
int64_t sgl_most(Subsets *s, const int32_t *states, int64_t number, int64_t within, int64_t *found) {
    int why = setjmp(s->out);
    if (why) return why;
    s->needs.number = 0;
    for (int64_t k = 0; k < number; k++) {
        State of = s->states.at[states[k]];
        int64_t most = 0, least = 0;
        for (int64_t i = of.members; i < of.members + of.number; i++) {
            uint64_t member = s->members.at[i];
            int64_t one = most_of(s, (int32_t)(uint32_t)member);
            int is_first = i == of.members || s->members.at[i - 1] >> 32 != member >> 32;
            least = is_first || !within || one < least ? one : least;
            int is_last = i + 1 == of.members + of.number || s->members.at[i + 1] >> 32 != member >> 32;
            if ((is_last || !within) && least > most) most = least;
        }
        found[k] = most;
    }
    s->needed = s->needs.at, s->num_needed = s->needs.number;
    return s->num_needed ? NEEDS : DONE;
}

void sgl_give_most(Subsets *s, int64_t what, int64_t which, int64_t most) {
    if (most > MOST) most = MOST;
    if (what == SHORTEST) s->exprs.at[which].shortest = most;
    else if (what == BEHIND_TARGET) s->targets.at[which].most = most;
    else s->threads.at[which].most = most;
}
