export type { components, operations, paths } from "./api.js";
export * from "./errors.js";
export { assistant, gen, type GenExpr, type GenOptions, image, type Part, RefExpr, type Sampling, select, system, user } from "./expr.js";
export type * as ir from "./ir.js";
export type { JsonSchema, SchemaOf, TypedSchema } from "./schema.js";
export { type ProgramEvent, Runtime, type RuntimeOptions } from "./session.js";
export { agent, Branches, program, type RunOptions, type SglProgram, type Started, State } from "./state.js";
export { type CalledTool, describeTools, tool, type Tool, type ToolCall } from "./tools.js";
