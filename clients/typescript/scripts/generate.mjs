// Writes src/ir.ts from docs/ir.schema.json, and src/api.ts from an OpenAPI document: node scripts/generate.mjs OPENAPI [FOLDER]
import { readFile, writeFile } from "node:fs/promises";
import { compile } from "json-schema-to-typescript";
import openapi, { astToString } from "openapi-typescript";

const [document, folder = new URL("../src", import.meta.url).pathname] = process.argv.slice(2);
if (!document) throw new Error("usage: node scripts/generate.mjs OPENAPI.json [FOLDER]");
const bannerComment = "// Made by scripts/generate.mjs: do not edit.";
const schema = JSON.parse(await readFile(new URL("../../../docs/ir.schema.json", import.meta.url), "utf-8"));
await writeFile(`${folder}/ir.ts`, await compile(schema, "IR", { bannerComment, unreachableDefinitions: true, format: true }));
const described = JSON.parse(await readFile(document, "utf-8"));
await writeFile(`${folder}/api.ts`, `${bannerComment}\n${astToString(await openapi(described))}`);
