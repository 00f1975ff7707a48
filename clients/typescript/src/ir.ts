// Made by scripts/generate.mjs: do not edit.

export type SglProgramVersion1 = Program | Segment;

export interface Program {
  v: 1;
  name: string;
  seed: number;
  defaults?: {
    max_tokens?: number;
    min_tokens?: number;
    n?: number;
    stop?: string[];
    stop_token_ids?: number[];
    stop_regex?: string[];
    temperature?: number;
    top_p?: number;
    top_k?: number;
    min_p?: number;
    frequency_penalty?: number;
    presence_penalty?: number;
    repetition_penalty?: number;
    ignore_eos?: boolean;
    return_logprob?: boolean;
    logprob_start_len?: number;
    top_logprobs_num?: number;
    return_text_in_logprobs?: boolean;
    seed?: number;
    logit_bias?: {
      [k: string]: unknown;
    };
    priority?: number;
    timeout?: number;
    extra?: {
      [k: string]: unknown;
    };
  };
  args?: {
    [k: string]: string;
  };
  stream?: boolean;
  lease_s?: number;
  deadline_s?: number | null;
  chat_template?: string | null;
  speculate_tokens?: number | null;
}
export interface Segment {
  nodes: (
    | Text
    | Arg
    | RoleBegin
    | RoleEnd
    | Media
    | Gen
    | Select
    | Ref
    | ScopeBegin
    | ScopeEnd
    | Fork
    | Join
    | Set
    | ToolResults
  )[];
  answers?: {
    st: number;
    index: number;
    turns: {
      role: string | null;
      content: string;
      name?: string | null;
      call_id?: string | null;
    }[];
  }[];
  final?: boolean;
}
export interface Text {
  st: number;
  op: "text";
  text: string;
}
export interface Arg {
  st: number;
  op: "arg";
  name: string;
}
export interface RoleBegin {
  st: number;
  op: "role_begin";
  role: string;
}
export interface RoleEnd {
  st: number;
  op: "role_end";
  role: string;
}
export interface Media {
  st: number;
  op: "media";
  kind: "image" | "video";
  data: string;
  fps?: number | null;
}
export interface Gen {
  st: number;
  op: "gen";
  name?: string | null;
  params?: {
    max_tokens?: number;
    min_tokens?: number;
    n?: number;
    stop?: string[];
    stop_token_ids?: number[];
    stop_regex?: string[];
    temperature?: number;
    top_p?: number;
    top_k?: number;
    min_p?: number;
    frequency_penalty?: number;
    presence_penalty?: number;
    repetition_penalty?: number;
    ignore_eos?: boolean;
    return_logprob?: boolean;
    logprob_start_len?: number;
    top_logprobs_num?: number;
    return_text_in_logprobs?: boolean;
    seed?: number;
    logit_bias?: {
      [k: string]: unknown;
    };
    priority?: number;
    timeout?: number;
    extra?: {
      [k: string]: unknown;
    };
  };
  constraint?: {
    regex?: string;
    json?: {
      [k: string]: unknown;
    };
    ebnf?: string;
  };
  dtype?: "int" | "float" | "bool" | "str";
  reasoning?:
    | "apertus"
    | "apertus2509"
    | "apriel"
    | "cohere_command3"
    | "cohere_command4"
    | "deepseek-r1"
    | "deepseek-v3"
    | "deepseek-v4"
    | "deepseek_r1"
    | "deepseek_v3"
    | "deepseek_v4"
    | "gemma4"
    | "glm45"
    | "glm47"
    | "gigachat35"
    | "gpt-oss"
    | "granite"
    | "holo2"
    | "hunyuan"
    | "hy_v3"
    | "interns1"
    | "kimi"
    | "kimi_k2"
    | "kimi_k3"
    | "ling3"
    | "mimo"
    | "minicpm3"
    | "minimax"
    | "minimax-m3"
    | "minimax_m2"
    | "minimax_m3"
    | "mistral"
    | "nemotron_3"
    | "nemotron_v3"
    | "olmo3"
    | "openai_gptoss"
    | "poolside_v1"
    | "qwen3"
    | "qwen3-thinking"
    | "seed_oss"
    | "solar_open2"
    | "step3"
    | "step3p5"
    | "telechat4";
  tools?: {
    [k: string]: unknown;
  }[];
}
export interface Select {
  st: number;
  op: "select";
  name: string | null;
  /**
   * @minItems 1
   */
  choices: [string, ...string[]];
  method?: "token_length_normalized" | "greedy_token_selection" | "unconditional_likelihood_normalized";
}
export interface Ref {
  st: number;
  op: "ref";
  stream: number;
  index: number;
  /**
   * @maxItems 64
   */
  functions?: ([unknown] | [unknown, unknown, unknown])[];
}
export interface ScopeBegin {
  st: number;
  op: "scope_begin";
  name: string;
}
export interface ScopeEnd {
  st: number;
  op: "scope_end";
  name: string;
}
export interface Fork {
  st: number;
  op: "fork";
  /**
   * @minItems 1
   */
  children: [number, ...number[]];
}
export interface Join {
  st: number;
  op: "join";
  children: number[];
  mode?: "gather" | "append" | "absorb";
}
export interface Set {
  st: number;
  op: "set";
  name: string;
  value: string;
}
export interface ToolResults {
  st: number;
  op: "tool_results";
  index: number;
}
