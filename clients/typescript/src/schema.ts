import { InvalidRequest } from "./errors.js";

export type JsonSchema = Record<string, unknown>;
/** A schema of zod 4, or of another library that describes itself as JSON Schema and parses. */
export interface TypedSchema<T> {
  parse(value: unknown): T;
  toJSONSchema?: (() => unknown) | undefined;
  "~standard"?: { readonly jsonSchema?: { output(options: { target: string }): Record<string, unknown> } } | undefined;
}
export type SchemaOf<T> = TypedSchema<T> | JsonSchema;

export function isTyped<T>(schema: SchemaOf<T>): schema is TypedSchema<T> {
  return typeof (schema as { parse?: unknown }).parse === "function";
}

/** The JSON Schema of a typed schema, or the plain one that was given. */
export function jsonSchema(schema: SchemaOf<unknown>): JsonSchema {
  if (!isTyped(schema)) return schema;
  const found = schema.toJSONSchema?.() ?? schema["~standard"]?.jsonSchema?.output({ target: "draft-2020-12" });
  if (typeof found !== "object" || found === null) throw new InvalidRequest("this schema does not tell its JSON Schema: give one of zod 4.2 or later, or z.toJSONSchema(schema)");
  const { $schema: _, ...rest } = found as JsonSchema;
  return JSON.parse(JSON.stringify(rest)) as JsonSchema;
}
