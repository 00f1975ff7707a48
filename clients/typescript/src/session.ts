import { EventSourceParserStream } from "eventsource-parser/stream";
import { ConnectionLost, SglError, toldError } from "./errors.js";
import type { Program, Segment } from "./ir.js";

/** What a server answers to a program's nodes. */
export type ProgramEvent =
  | { type: "opened"; id: string }
  | { type: "delta"; stream: number; index: number; text: string; meta?: Record<string, unknown>; reasoning?: string }
  | { type: "node_done"; stream: number; index: number; text: string; value: unknown; meta: Record<string, unknown> }
  | { type: "need"; stream: number; index: number }
  | { type: "node_failed"; stream: number | null; index: number | null; error: { message: string; class?: string; param?: string | null; code?: string | null } }
  | { type: "done" };

export interface RuntimeOptions {
  apiKey?: string;
  /** Another fetch, for proxies and tests. */
  fetch?: typeof fetch;
  /** Seconds until an answer must begin. */
  timeout?: number;
  /** How often a broken connection is taken up again. */
  retries?: number;
}

/** A server. */
export class Runtime {
  readonly url: string;
  readonly retries: number;
  private readonly headers: Record<string, string>;
  private readonly send: typeof fetch;
  private readonly seconds: number;

  constructor(url: string, options: RuntimeOptions = {}) {
    this.url = url.replace(/\/+$/, "");
    this.headers = options.apiKey === undefined ? {} : { Authorization: `Bearer ${options.apiKey}` };
    this.send = options.fetch ?? ((...given) => fetch(...given));
    this.seconds = options.timeout ?? 600;
    this.retries = options.retries ?? 3;
  }

  /** Ask; throws an SglError for what the server refuses, and ConnectionLost. */
  async request(method: string, path: string, body?: unknown, more: { signal?: AbortSignal | undefined; headers?: Record<string, string> } = {}): Promise<Response> {
    const late = new AbortController(), timer = setTimeout(() => late.abort(), 1000 * this.seconds);
    const signal = more.signal === undefined ? late.signal : AbortSignal.any([late.signal, more.signal]);
    const given = body === undefined ? {} : { body: JSON.stringify(body) };
    const headers = { ...this.headers, ...more.headers, ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
    let answer: Response;
    try {
      answer = await this.send(`${this.url}${path}`, { method, headers, signal, ...given });
    } catch (error) {
      if (more.signal?.aborted) throw more.signal.reason;
      throw new ConnectionLost(late.signal.aborted ? `${this.url} did not answer within ${this.seconds} s` : `${this.url} cannot be reached: ${String(error)}`);
    } finally {
      clearTimeout(timer);
    }
    if (answer.ok) return answer;
    const told = (await answer.json().catch(() => undefined)) as { error?: { message?: string } } | undefined;
    throw toldError(told?.error, answer.status);
  }
}

/** A program on a server: segments out, numbered events in. */
export class Session {
  private id: string | null = null;
  private lastEvent = "0";
  private number = 0;
  private sending: Promise<unknown> = Promise.resolve();
  private opened: (() => void) | null = null;
  private readonly isOpen = new Promise<void>(resolve => { this.opened = resolve; });

  constructor(private readonly runtime: Runtime, private readonly take: (event: ProgramEvent) => void, private readonly signal: AbortSignal | undefined) {}

  /** Run a program from its first segment to its end. Throws what goes wrong with the connection. */
  async run(program: Program, segment: Segment): Promise<void> {
    const cancel = () => void this.cancel();
    this.signal?.addEventListener("abort", cancel, { once: true });
    try {
      let ask = () => this.runtime.request("POST", "/v1/programs", { program, segment }, { signal: this.signal });
      for (let tries = 0; ; tries++) {
        const before = this.lastEvent;
        try {
          if (await this.read(await ask())) return;
        } catch (error) {
          if (this.signal?.aborted) throw this.signal.reason;
          if (error instanceof SglError && (this.id === null || !(error instanceof ConnectionLost))) throw error;
        }
        if (this.lastEvent !== before) tries = 0;
        if (this.id === null || tries >= this.runtime.retries) throw new ConnectionLost("the connection broke before the program ended");
        await new Promise(resolve => setTimeout(resolve, 200 * 2 ** tries));
        ask = () => this.runtime.request("GET", `/v1/programs/${this.id}/events`, undefined, { signal: this.signal, headers: { "Last-Event-ID": this.lastEvent } });
      }
    } finally {
      this.signal?.removeEventListener("abort", cancel);
    }
  }

  /** Send another segment, after those before it. Numbers make it safe to send one again. */
  post(segment: Segment): Promise<unknown> {
    const number = ++this.number;
    const sent = this.sending.then(async () => {
      await this.isOpen;
      for (let tries = 0; ; tries++) {
        try {
          return await this.runtime.request("POST", `/v1/programs/${this.id}/segments`, { segment, number }, { signal: this.signal });
        } catch (error) {
          if (!(error instanceof ConnectionLost) || tries >= this.runtime.retries) throw error;
        }
      }
    });
    this.sending = sent.catch(() => undefined);
    return sent;
  }

  private async cancel(): Promise<void> {
    if (this.id !== null) await this.runtime.request("DELETE", `/v1/programs/${this.id}`).catch(() => undefined);
  }

  /** Read events; true once the program is done. */
  private async read(answer: Response): Promise<boolean> {
    if (answer.body === null) return false;
    const events = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
    const reader = events.getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      if (value.id !== undefined) this.lastEvent = value.id;
      const event = JSON.parse(value.data) as ProgramEvent;
      if (event.type === "opened") {
        this.id = event.id;
        this.opened?.();
      }
      this.take(event);
      if (event.type === "done") return true;
    }
  }
}
