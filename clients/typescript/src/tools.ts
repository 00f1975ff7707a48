import { jsonSchema, isTyped, type JsonSchema, type SchemaOf } from "./schema.js";

/** A function that the model may call. */
export interface Tool {
  readonly name: string;
  readonly description: string;
  readonly parameters: JsonSchema;
  readonly call: (given: unknown) => Promise<unknown>;
}
export interface ToolCall { name: string; arguments: unknown; id?: string }
/** A call and what came of it. */
export interface CalledTool extends ToolCall { result: string }

/** A tool of a function; `parameters` is a schema of zod, whose type the function takes, or a JSON Schema. */
export function tool<T>(about: { name: string; description: string; parameters: SchemaOf<T>; execute: (given: T) => unknown }): Tool {
  const { parameters, execute } = about;
  const call = async (given: unknown) => execute(isTyped(parameters) ? parameters.parse(given) : (given as T));
  return { name: about.name, description: about.description, parameters: jsonSchema(parameters), call };
}

export const toolSpec = ({ name, description, parameters }: Tool) => ({ name, description, parameters });

/** What a call of one of the tools looks like, as JSON Schema. */
export function toolUnion(tools: Tool[]): JsonSchema {
  const each = tools.map((one, i) => ({
    type: "object", properties: { name: { const: one.name }, arguments: { $id: `urn:function:${i}`, ...one.parameters } }, required: ["name", "arguments"], additionalProperties: false,
  }));
  return each.length === 1 ? each[0]! : { anyOf: each };
}

/** JSON as Python's json.dumps writes it, so that prompts of both languages are the same text. */
function dumps(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(dumps).join(", ")}]`;
  if (typeof value === "object" && value !== null) return `{${Object.entries(value).map(([key, item]) => `${dumps(key)}: ${dumps(item)}`).join(", ")}}`;
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Says in a system message what functions there are and how to call them. */
export function describeTools(tools: Tool[]): string {
  return `You may call these functions:\n<tools>\n${tools.map(one => `${dumps(toolSpec(one))}\n`).join("")}</tools>\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else. Several calls may follow each other. Answer in plain text when you need no function.`;
}

/** The calls in a text. */
export function callsIn(text: string, isRequired: boolean): ToolCall[] {
  const found = isRequired ? [text] : [...text.matchAll(/<tool_call>(.*?)<\/tool_call>/gs)].map(match => match[1]!);
  return found.flatMap(each => {
    try {
      const call = JSON.parse(each) as ToolCall;
      return typeof call.name === "string" ? [call] : [];
    } catch {
      return [];
    }
  });
}

/** Run a call; what fails is told to the model. */
export async function runTool(tools: Tool[], call: ToolCall): Promise<string> {
  const found = tools.find(each => each.name === call.name);
  if (found === undefined) return `Error: there is no function ${call.name}`;
  try {
    const result = await found.call(call.arguments);
    return typeof result === "string" ? result : typeof result === "object" && result !== null ? dumps(result) : String(result);
  } catch (error) {
    return `Error: ${error instanceof Error ? error.message : String(error)}`;
  }
}
