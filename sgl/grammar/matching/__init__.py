"""A text's place in its automaton: token masks, budgets and forced text."""
