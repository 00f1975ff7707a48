import { Aborted, ProgramError, SglError, toldError } from "./errors.js";
import { assistant, gen, type GenExpr, type GenOptions, type Part, params, RefExpr, type Sampling, type SelectExpr } from "./expr.js";
import type { Program, Segment } from "./ir.js";
import { type ProgramEvent, type Runtime, Session } from "./session.js";
import { type CalledTool, callsIn, runTool, type Tool } from "./tools.js";

type Node = Segment["nodes"][number];
type Answer = NonNullable<Segment["answers"]>[number];
/** What a node wrote. */
export interface Outcome { text: string; value: unknown; meta: Record<string, unknown> }
type Entry = string | { stream: number; index: number } | { branches: State[] };

export interface RunOptions extends Sampling {
  /** The same program with the same seed gives the same texts. */
  seed?: number;
  /** Events of new text as it comes. */
  stream?: boolean;
  signal?: AbortSignal;
  /** A registered chat template in place of the model's own. */
  chatTemplate?: string;
}

class Deferred<T> {
  resolve!: (value: T) => void;
  reject!: (error: unknown) => void;
  readonly promise = new Promise<T>((resolve, reject) => { this.resolve = resolve; this.reject = reject; });
  constructor() { this.promise.catch(() => undefined); } // nobody has to wait for it
}

/** One run of a program: what was recorded, sent, and answered. */
class Run {
  readonly header: Program;
  readonly outcomes = new Map<string, Deferred<Outcome>>();
  readonly toolGens = new Map<string, { gen: string; expr: GenExpr<unknown>; called: Deferred<CalledTool[]> }>();
  readonly events: ProgramEvent[] = [];
  numStreams = 1;
  ended: Promise<void> | null = null;
  failure: unknown = null;
  private waiting: Node[] = [];
  private listeners = new Set<() => void>();
  private readonly session: Session;
  private readonly signal: AbortSignal | undefined;

  constructor(runtime: Runtime, name: string, options: RunOptions) {
    const { seed = Math.floor(Math.random() * 2 ** 53), stream, signal, chatTemplate, ...sampling } = options;
    const defaults = params(sampling);
    this.signal = signal;
    this.header = { v: 1, name, seed, ...(Object.keys(defaults).length ? { defaults } : {}), ...(stream ? { stream } : {}), ...(chatTemplate === undefined ? {} : { chat_template: chatTemplate }) };
    this.session = new Session(runtime, event => this.take(event), signal);
  }

  record(node: Node): void { this.waiting.push(node); }

  /** Send what was recorded. */
  flush(final = false): void {
    if (!final && !this.waiting.length) return;
    const segment: Segment = { nodes: this.waiting, ...(final ? { final } : {}) };
    this.waiting = [];
    if (this.ended === null) {
      this.ended = this.session.run(this.header, segment).catch(error => this.fail(error));
    } else {
      this.session.post(segment).catch(error => this.fail(error));
    }
  }

  outcome(stream: number, index: number): Deferred<Outcome> {
    const key = `${stream}/${index}`;
    let found = this.outcomes.get(key);
    if (found === undefined) this.outcomes.set(key, (found = new Deferred<Outcome>()));
    if (this.failure !== null) found.reject(this.failure);
    return found;
  }

  fail(error: unknown): void {
    this.failure ??= this.signal?.aborted ? new Aborted("the program was aborted", null, "aborted") : error;
    for (const each of this.outcomes.values()) each.reject(this.failure);
    for (const each of this.toolGens.values()) each.called.reject(this.failure);
    this.wake();
  }

  /** Its events, from the first. */
  async *all(): AsyncGenerator<ProgramEvent> {
    for (let next = 0; ; ) {
      while (next < this.events.length) {
        const event = this.events[next++]!;
        yield event;
        if (event.type === "done") return;
      }
      if (this.failure !== null) throw this.failure;
      await new Promise<void>(resolve => { const once = () => { this.listeners.delete(once); resolve(); }; this.listeners.add(once); });
    }
  }

  private take(event: ProgramEvent): void {
    this.events.push(event);
    if (event.type === "node_done") this.outcome(event.stream, event.index).resolve(event);
    else if (event.type === "need") void this.answer(event.stream, event.index).catch(error => this.fail(error));
    else if (event.type === "node_failed") {
      const error = toldError(event.error, null);
      if (event.stream === null || event.index === null) this.fail(error);
      else {
        this.outcome(event.stream, event.index).reject(error);
        this.failure ??= error; // what follows fails with it, without events of its own
        for (const [key, each] of this.outcomes) if (key !== `${event.stream}/${event.index}`) each.reject(error);
      }
    }
    this.wake();
  }

  private wake(): void { for (const each of [...this.listeners]) each(); }

  private async answer(stream: number, index: number): Promise<void> {
    const asked = this.toolGens.get(`${stream}/${index}`);
    if (asked === undefined) throw new ProgramError(`the server wants tool results that no gen asked for, at ${stream}/${index}`);
    const { text } = await this.outcomes.get(asked.gen)!.promise;
    const called = await Promise.all(callsIn(text, asked.expr.isRequired).map(async call => ({ ...call, result: await runTool(asked.expr.tools, call) })));
    asked.called.resolve(called);
    const turns = called.map(({ name, result, id }) => ({ role: "tool", content: result, name, ...(id === undefined ? {} : { call_id: id }) }));
    const answers: Answer[] = [{ st: stream, index, turns }];
    await this.session.post({ nodes: [], answers });
  }
}

interface Variable { kind: "node" | "text" | "branches"; stream: number; index: number; text: string; expr: GenExpr<unknown> | SelectExpr | null; of: State[] }

/** A stream of a run: what is appended is recorded at once, and sent when something is awaited. */
export class State {
  private next = 0;
  private readonly entries: Entry[];
  private readonly variables: Map<string, Variable>;

  /** Programs make these. */
  constructor(private readonly run: Run, private readonly stream: number, parent?: State) {
    this.entries = parent === undefined ? [] : [...parent.entries];
    this.variables = new Map(parent?.variables);
  }

  /** Append texts and expressions; texts beside each other become one node. */
  add(...parts: Part[]): this {
    let text = "";
    const write = () => {
      if (text) { this.record({ st: this.stream, op: "text", text }); this.entries.push(text); }
      text = "";
    };
    for (const part of parts) {
      if (typeof part === "string" || typeof part === "number") { text += part; continue; }
      write();
      switch (part.kind) {
        case "gen": case "select": {
          const index = this.record({ st: this.stream, op: part.kind, ...part.node } as Node);
          this.entries.push({ stream: this.stream, index });
          this.run.outcome(this.stream, index);
          if (part.name !== null) this.variables.set(part.name, { kind: "node", stream: this.stream, index, text: "", expr: part, of: [] });
          if (part.kind === "gen" && part.tools.length) this.toolGen = { index, expr: part };
          break;
        }
        case "role": this.turn(part.role, () => this.add(...part.parts)); break;
        case "media": this.entries.push({ stream: this.stream, index: this.record({ st: this.stream, op: "media", kind: part.media, data: part.data }) }); break;
        case "ref": {
          const index = this.record({ st: this.stream, op: "ref", stream: part.stream, index: part.index, ...(part.functions.length ? { functions: [...part.functions] } : {}) } as Node);
          this.entries.push({ stream: this.stream, index });
        }
      }
    }
    write();
    return this;
  }

  private toolGen: { index: number; expr: GenExpr<unknown> } | null = null;

  private turn(role: "system" | "user" | "assistant", fill: () => void): void {
    this.entries.push({ stream: this.stream, index: this.record({ st: this.stream, op: "role_begin", role }) });
    fill();
    this.entries.push({ stream: this.stream, index: this.record({ st: this.stream, op: "role_end", role }) });
    if (this.toolGen !== null) {
      const { index, expr } = this.toolGen;
      this.toolGen = null;
      const at = this.record({ st: this.stream, op: "tool_results", index });
      this.entries.push({ stream: this.stream, index: at });
      this.run.toolGens.set(`${this.stream}/${at}`, { gen: `${this.stream}/${index}`, expr, called: new Deferred() });
    }
  }

  /** A variable of the program's own. */
  set(name: string, value: string): this {
    const index = this.record({ st: this.stream, op: "set", name, value });
    this.variables.set(name, { kind: "text", stream: this.stream, index, text: value, expr: null, of: [] });
    return this;
  }

  /** Streams that continue from here side by side; their common text is computed once. */
  fork(number: number): Branches {
    const children = Array.from({ length: number }, () => this.run.numStreams++);
    this.record({ st: this.stream, op: "fork", children } as Node);
    return new Branches(this, children.map(child => new State(this.run, child, this)), children);
  }

  /** For Branches. */
  joined(branches: State[], children: number[], mode: "gather" | "append" | "absorb"): void {
    this.record({ st: this.stream, op: "join", children, ...(mode === "gather" ? {} : { mode }) } as Node);
    if (mode === "append") this.entries.push({ branches });
    if (mode === "gather") for (const name of new Set(branches.flatMap(each => [...each.variables.keys()].filter(key => each.variables.get(key) !== this.variables.get(key))))) this.variables.set(name, { kind: "branches", stream: this.stream, index: -1, text: "", expr: null, of: branches });
  }

  /** The text of a variable, once it is there; a list where branches were joined or n is greater than 1. */
  async get(name: string): Promise<string>;
  async get<T = string | string[]>(name: string): Promise<T>;
  async get(name: string): Promise<unknown> {
    const variable = this.variable(name);
    if (variable.kind === "text") return variable.text;
    if (variable.kind === "branches") return Promise.all(variable.of.map(each => each.get(name)));
    return (await this.wait(variable)).value;
  }

  /** The value of a gen: of its schema's type. */
  async value<T>(name: string | GenExpr<T>): Promise<T> {
    const variable = typeof name === "string" ? this.variable(name) : this.of(name);
    const { text, value } = await this.wait(variable);
    const expr = variable.expr;
    if (expr?.kind !== "gen") return value as T;
    return (Array.isArray(value) ? value.map(each => expr.read(String(each))) : expr.read(text)) as T;
  }

  /** What a node cost and told: probabilities of a select, finish_reason, usage. */
  async meta(name: string): Promise<Record<string, any>> { return (await this.wait(this.variable(name))).meta; }

  /** The calls of tools that a gen made, with their results. */
  async calls(name: string): Promise<CalledTool[]> {
    const { stream, index } = this.variable(name);
    const asked = [...this.run.toolGens.values()].find(each => each.gen === `${stream}/${index}`);
    if (asked === undefined) throw new ProgramError(`${JSON.stringify(name)} was generated without tools`);
    this.run.flush();
    return asked.called.promise;
  }

  /** A variable's text in another place, for which nobody waits. */
  ref(name: string): RefExpr {
    const { kind, stream, index } = this.variable(name);
    if (kind !== "node") throw new ProgramError(`${JSON.stringify(name)} is no single generated text: a reference needs one`);
    return new RefExpr(stream, index);
  }

  /** All text of this stream from the program's beginning. */
  async text(): Promise<string> {
    const texts = await Promise.all(this.entries.map(async entry => {
      if (typeof entry === "string") return entry;
      if ("branches" in entry) return (await Promise.all(entry.branches.map(each => each.written()))).join("");
      this.run.flush();
      return (await this.run.outcome(entry.stream, entry.index).promise).text;
    }));
    return texts.join("");
  }

  /** Pieces of text as they come, of one variable or of the whole stream. The run needs `stream: true` for pieces smaller than a node's text. */
  async *pieces(name?: string): AsyncGenerator<string> {
    this.run.flush();
    const only = name === undefined ? null : this.variable(name), sent = new Map<number, number>();
    let at = 0;
    for await (const event of this.run.all()) {
      if (event.type === "done") break;
      if ((event.type !== "delta" && event.type !== "node_done") || event.stream !== (only === null ? this.stream : only.stream)) continue;
      if (only === null) {
        for (; at < this.entries.length; at++) {
          const entry = this.entries[at]!;
          if (typeof entry === "string") yield entry;
          else if (!("index" in entry) || entry.stream !== this.stream || entry.index >= event.index) break;
        }
      } else if (event.index !== only.index) continue;
      const before = sent.get(event.index) ?? 0, piece = event.type === "delta" ? event.text : event.text.slice(before);
      sent.set(event.index, before + piece.length);
      if (piece) yield piece;
      if (only !== null && event.type === "node_done") return;
    }
    for (; only === null && at < this.entries.length; at++) { const entry = this.entries[at]!; if (typeof entry === "string") yield entry; }
  }

  /** The server's events, from the first. */
  events(): AsyncGenerator<ProgramEvent> { this.run.flush(); return this.run.all(); }

  private async written(): Promise<string> {
    const own = this.entries.filter(entry => typeof entry !== "string" && "index" in entry && entry.stream === this.stream);
    return (await Promise.all(own.map(async entry => (await this.run.outcome(this.stream, (entry as { index: number }).index).promise).text))).join("");
  }

  private of(expr: GenExpr<unknown>): Variable {
    const found = [...this.variables.values()].find(each => each.expr === expr);
    if (found === undefined) throw new ProgramError("this gen was not appended here under a name");
    return found;
  }

  private variable(name: string): Variable {
    const found = this.variables.get(name);
    if (found === undefined) throw new ProgramError(`nothing is called ${JSON.stringify(name)} here: there are ${[...this.variables.keys()].join(", ") || "no variables"}`);
    return found;
  }

  private wait(variable: Variable): Promise<Outcome> {
    if (variable.kind !== "node") throw new ProgramError("this is no single generated value: ask the branches, or use get");
    this.run.flush();
    return this.run.outcome(variable.stream, variable.index).promise;
  }

  private record(node: Node): number { this.run.record(node); return this.next++; }
}

/** Streams of a fork. */
export class Branches implements Iterable<State> {
  constructor(private readonly parent: State, private readonly states: State[], private readonly children: number[]) {}

  get length(): number { return this.states.length; }
  [Symbol.iterator](): IterableIterator<State> { return this.states[Symbol.iterator](); }
  map<T>(of: (state: State, index: number) => T): T[] { return this.states.map(of); }
  /** The branch of a number; negative ones count from the end. */
  at(index: number): State {
    const found = this.states.at(index);
    if (found === undefined) throw new ProgramError(`there are ${this.states.length} branches, and none is ${index}`);
    return found;
  }

  /** Append to each: the same, or what a function of its number gives. */
  add(...parts: (Part | ((index: number) => Part | Part[]))[]): this {
    this.states.forEach((state, i) => state.add(...parts.flatMap(part => (typeof part === "function" ? part(i) : part))));
    return this;
  }

  /** Wait for the branches. "gather": their variables become lists; "append": their texts follow each other. */
  join(mode: "gather" | "append" | "absorb" = "gather"): void { this.parent.joined(this.states, this.children, mode); }
}

/** A program that was started. */
export interface Started<R> { state: State; done: Promise<State & { result: R }> }

/** A program: what it appends is recorded, shipped to the server whole, and executed there. */
export interface SglProgram<A extends unknown[], R> {
  readonly programName: string;
  /** Run it to its end. */
  run(runtime: Runtime, args: A, options?: RunOptions): Promise<State & { result: R }>;
  /** Run it, to read what comes meanwhile. */
  start(runtime: Runtime, args: A, options?: RunOptions): Started<R>;
}

/** A program of a function that appends to a state. */
export function program<A extends unknown[], R>(name: string, body: (s: State, ...args: A) => R | Promise<R>): SglProgram<A, R> {
  const start = (runtime: Runtime, args: A, options: RunOptions = {}): Started<R> => {
    const run = new Run(runtime, name, options), state = new State(run, 0);
    const finish = async () => {
      let result: R;
      try {
        result = await body(state, ...args);
      } finally {
        run.flush(true);
      }
      await run.ended;
      if (run.failure !== null) throw run.failure instanceof SglError || run.failure instanceof Error ? run.failure : new ProgramError(String(run.failure));
      return Object.assign(state, { result });
    };
    const done = finish();
    done.catch(() => undefined);
    return { state, done };
  };
  return { programName: name, start, run: (runtime, args, options) => start(runtime, args, options).done };
}

/** Let the model call tools until it answers in plain text, `maxSteps` times at most. */
export async function agent(s: State, tools: Tool[], options: { maxSteps?: number; name?: string } & GenOptions<unknown> = {}): Promise<string> {
  const { maxSteps = 8, name = "answer", ...rest } = options;
  let text = "";
  for (let step = 0; step < maxSteps; step++) {
    s.add(assistant(gen(name, { ...rest, tools })));
    text = await s.get(name);
    if (!callsIn(text, false).length) break;
  }
  return text;
}
