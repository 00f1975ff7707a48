import { InvalidRequest } from "./errors.js";
import type { Gen as GenNode, Ref as RefNode, Select as SelectNode } from "./ir.js";
import { isTyped, jsonSchema, type SchemaOf, type TypedSchema } from "./schema.js";
import { type Tool, toolSpec, toolUnion } from "./tools.js";

/** What a program appends. */
export type Part = string | number | Expr;
export type Expr = GenExpr<unknown> | SelectExpr | RefExpr | RoleExpr | MediaExpr;
export type Role = "system" | "user" | "assistant";
type Params = NonNullable<GenNode["params"]>;

/** Sampling; what is left out comes from the run's options, then the server's defaults. */
export interface Sampling {
  maxTokens?: number;
  minTokens?: number;
  n?: number;
  stop?: string | string[];
  stopTokenIds?: number[];
  stopRegex?: string | string[];
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  frequencyPenalty?: number;
  presencePenalty?: number;
  repetitionPenalty?: number;
  ignoreEos?: boolean;
  returnLogprob?: boolean;
  topLogprobsNum?: number;
  returnTextInLogprobs?: boolean;
  seed?: number;
  logitBias?: Record<string, number>;
  priority?: number;
  timeout?: number;
}

const NAMES: Record<keyof Sampling, keyof Params> = {
  maxTokens: "max_tokens", minTokens: "min_tokens", n: "n", stop: "stop", stopTokenIds: "stop_token_ids", stopRegex: "stop_regex", temperature: "temperature", topP: "top_p", topK: "top_k", minP: "min_p",
  frequencyPenalty: "frequency_penalty", presencePenalty: "presence_penalty", repetitionPenalty: "repetition_penalty", ignoreEos: "ignore_eos", returnLogprob: "return_logprob", topLogprobsNum: "top_logprobs_num",
  returnTextInLogprobs: "return_text_in_logprobs", seed: "seed", logitBias: "logit_bias", priority: "priority", timeout: "timeout",
};

/** Sampling as a program's JSON has it. Throws InvalidRequest for a name that there is not. */
export function params(options: object, others: readonly string[] = []): Params {
  const found: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || others.includes(name)) continue;
    const known = NAMES[name as keyof Sampling];
    if (known === undefined) throw new InvalidRequest(`there is no option ${JSON.stringify(name)}: there are ${[...others, ...Object.keys(NAMES)].join(", ")}`, null, null, name);
    found[known] = (known === "stop" || known === "stop_regex") && typeof value === "string" ? [value] : value;
  }
  return found as Params;
}

export interface GenOptions<T> extends Sampling {
  /** A schema of zod, whose type the value has, or a JSON Schema. */
  schema?: SchemaOf<T>;
  regex?: string;
  ebnf?: string;
  dtype?: "int" | "float" | "bool" | "str";
  reasoning?: NonNullable<GenNode["reasoning"]>;
  tools?: Tool[];
  /** "required": the output is a call of one of the tools. */
  toolChoice?: "auto" | "required";
}
const OTHERS = ["schema", "regex", "ebnf", "dtype", "reasoning", "tools", "toolChoice"] as const;

export interface GenExpr<T> { readonly kind: "gen"; readonly name: string | null; readonly node: Omit<GenNode, "st" | "op">; readonly read: (text: string) => T; readonly tools: Tool[]; readonly isRequired: boolean }
export interface SelectExpr { readonly kind: "select"; readonly name: string | null; readonly node: Omit<SelectNode, "st" | "op"> }
export interface RoleExpr { readonly kind: "role"; readonly role: Role; readonly parts: Part[] }
export interface MediaExpr { readonly kind: "media"; readonly media: "image" | "video"; readonly data: string }

/** Generated text. With a typed schema the value has its type. */
export function gen<T>(name: string | null, options: GenOptions<T> & { schema: TypedSchema<T> }): GenExpr<T>;
export function gen(name?: string | null, options?: GenOptions<unknown>): GenExpr<string>;
export function gen(name: string | null = null, options: GenOptions<unknown> = {}): GenExpr<unknown> {
  const { schema, regex, ebnf, dtype, reasoning, tools = [], toolChoice } = options;
  const isRequired = toolChoice === "required";
  if (isRequired && !tools.length) throw new InvalidRequest("toolChoice \"required\" needs tools", null, null, "toolChoice");
  const given = Object.entries({ json: schema && jsonSchema(schema), regex, ebnf, tools: isRequired ? toolUnion(tools) : undefined }).filter(([, value]) => value !== undefined);
  if (given.length + (dtype === undefined ? 0 : 1) > 1) throw new InvalidRequest("give one of schema, regex, ebnf, dtype and toolChoice \"required\"", null, null, "schema");
  const chosen = params(options, OTHERS), node: Record<string, unknown> = { name };
  if (Object.keys(chosen).length) node.params = chosen;
  for (const [kind, value] of given) node.constraint = { [kind === "tools" ? "json" : kind]: value };
  if (dtype !== undefined) node.dtype = dtype;
  if (reasoning !== undefined) node.reasoning = reasoning;
  if (tools.length) node.tools = tools.map(toolSpec);
  const read = schema === undefined ? (text: string) => text : (text: string) => (isTyped(schema) ? schema.parse(JSON.parse(text)) : JSON.parse(text));
  return { kind: "gen", name, node: node as GenExpr<unknown>["node"], read, tools, isRequired };
}

/** The preferred of some texts, by their exact probabilities. */
export function select(name: string | null, choices: readonly string[], options: { method?: NonNullable<SelectNode["method"]> } = {}): SelectExpr {
  const method = options.method === undefined || options.method === "token_length_normalized" ? {} : { method: options.method };
  return { kind: "select", name, node: { name, choices: [...choices], ...method } as SelectExpr["node"] };
}

const role = (kind: Role) => (...parts: Part[]): RoleExpr => ({ kind: "role", role: kind, parts });
/** A turn of the conversation. */
export const system = role("system"), user = role("user"), assistant = role("assistant");
/** A picture, in base64. */
export const image = (data: string): MediaExpr => ({ kind: "media", media: "image", data });

type TextFunction = NonNullable<RefNode["functions"]>[number];
/** The text of an earlier node, for which nobody waits here. */
export class RefExpr {
  readonly kind = "ref";
  constructor(readonly stream: number, readonly index: number, readonly functions: readonly TextFunction[] = []) {}
  private with(...one: unknown[]): RefExpr { return new RefExpr(this.stream, this.index, [...this.functions, one as unknown as TextFunction]); }
  strip(): RefExpr { return this.with("strip"); }
  lower(): RefExpr { return this.with("lower"); }
  upper(): RefExpr { return this.with("upper"); }
  split(separator: string | null, which: number): RefExpr { return this.with("split", separator, which); }
  slice(start: number | null, stop: number | null): RefExpr { return this.with("slice", start, stop); }
  replace(old: string, by: string): RefExpr { return this.with("replace", old, by); }
}
