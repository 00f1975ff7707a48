import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import { z } from "zod";
import { Aborted, ConnectionLost, gen, InvalidRequest, program, ProgramError, QueueFull, Runtime, select, Unauthorized, user } from "../dist/index.js";

/** A server that plays a script: for each request an answer, [status, JSON] or a list of events, ended or cut. */
async function playing(script, body) {
  const asked = [];
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const chunk of request) text += chunk;
    const path = `${request.method} ${request.url}`;
    asked.push({ path, body: text ? JSON.parse(text) : null, headers: request.headers });
    const answer = typeof script === "function" ? script(path, asked.length) : script[asked.length - 1];
    if (!Array.isArray(answer)) { response.writeHead(answer.status, { "Content-Type": "application/json" }).end(JSON.stringify(answer.json)); return; }
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    for (const each of answer) {
      if (each === "cut") { setTimeout(() => response.destroy(), 50); return; }
      if (each === "hang") return;
      response.write(each);
    }
    response.end();
  });
  await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
  try {
    await body(`http://127.0.0.1:${server.address().port}`, asked);
  } finally {
    server.closeAllConnections();
    server.close();
  }
}
async function until(isSo) {
  for (let looks = 0; !isSo(); looks++) { assert.ok(looks < 5000, "it did not come to that"); await soon(); }
}
const soon = () => new Promise(resolve => setTimeout(() => resolve("not yet"), 20));
const event = (id, data) => `id: ${id}\ndata: ${JSON.stringify(data)}\n\n`;
const opened = event(1, { type: "opened", id: "p1" }), done = id => event(id, { type: "done" });
const node = (id, index, text, more = {}) => event(id, { type: "node_done", stream: 0, index, text, value: text, meta: {}, ...more });
const hello = program("hello", s => { s.add("Hello ", gen("x", { maxTokens: 4 })); });

test("a program whose body waits for nothing is one request", async () => {
  await playing([[opened, node(2, 1, "world"), done(3)]], async (url, asked) => {
    const state = await hello.run(new Runtime(url, { apiKey: "k" }), [], { seed: 5, temperature: 0.5 });
    assert.equal(await state.text(), "Hello world");
    assert.deepEqual(asked.map(each => each.path), ["POST /v1/programs"]);
    assert.equal(asked[0].headers.authorization, "Bearer k");
    assert.deepEqual(asked[0].body, {
      program: { v: 1, name: "hello", seed: 5, defaults: { temperature: 0.5 } },
      segment: { nodes: [{ st: 0, op: "text", text: "Hello " }, { st: 0, op: "gen", name: "x", params: { max_tokens: 4 } }], final: true },
    });
  });
});

test("a body that waits sends what it has, and later what followed", async () => {
  const two = program("two", async s => { s.add(gen("a")); s.add(` after ${await s.get("a")}`); return "r"; });
  await playing(path => (path === "POST /v1/programs" ? [opened, node(2, 0, "A"), "hang"] : path.endsWith("/segments") ? { status: 200, json: { id: "p1" } } : [done(3)]), async (url, asked) => {
    const running = two.start(new Runtime(url), []);
    const ended = running.done.then(() => "ended", () => "failed");
    await until(() => asked.length === 2);
    assert.equal(await Promise.race([ended, soon()]), "not yet");
    assert.deepEqual(asked.map(each => each.path), ["POST /v1/programs", "POST /v1/programs/p1/segments"]);
    assert.deepEqual(asked[1].body, { segment: { nodes: [{ st: 0, op: "text", text: " after A" }], final: true }, number: 1 });
  });
});

test("a broken connection is taken up where it broke", async () => {
  await playing(path => (path === "POST /v1/programs" ? [opened, "cut"] : [node(2, 1, "world"), done(3)]), async (url, asked) => {
    const state = await hello.run(new Runtime(url), []);
    assert.equal(await state.get("x"), "world");
    assert.equal(asked[1].path, "GET /v1/programs/p1/events");
    assert.equal(asked[1].headers["last-event-id"], "1");
  });
});

test("a connection that stays broken is an error, after some tries", async () => {
  await playing(path => (path === "POST /v1/programs" ? [opened, "cut"] : ["cut"]), async (url, asked) => {
    await assert.rejects(hello.run(new Runtime(url, { retries: 2 }), []), ConnectionLost);
    assert.equal(asked.length, 3);
  });
  await assert.rejects(hello.run(new Runtime("http://127.0.0.1:9"), []), ConnectionLost);
});

test("what the server refuses is an error of its kind", async () => {
  for (const [status, kind] of [[400, InvalidRequest], [401, Unauthorized], [429, QueueFull]]) {
    await playing([{ status, json: { error: { message: "no such thing", param: "program" } } }], async url => {
      await assert.rejects(hello.run(new Runtime(url), []), error => error instanceof kind && error.message === "no such thing" && error.param === "program");
    });
  }
});

test("a node that fails fails what waits for it and the run", async () => {
  const failed = event(2, { type: "node_failed", stream: 0, index: 1, error: { message: "too hard", class: "GrammarError" } });
  await playing([[opened, failed, done(3)]], async url => {
    const { state, done } = hello.start(new Runtime(url), []);
    await assert.rejects(state.get("x"), { name: "GrammarError", message: "too hard" });
    await assert.rejects(done, { name: "GrammarError" });
  });
});

test("an abort ends the run and tells the server", async () => {
  await playing(path => (path === "POST /v1/programs" ? [opened, node(2, 1, "world"), "hang"] : { status: 200, json: {} }), async (url, asked) => {
    const stop = new AbortController(), { state, done } = hello.start(new Runtime(url), [], { signal: stop.signal });
    await state.get("x");
    stop.abort();
    await assert.rejects(done, Aborted);
    await until(() => asked.length === 2);
    assert.equal(asked[1].path, "DELETE /v1/programs/p1");
  });
});

test("values have their schema's type, and wrong ones are refused", async () => {
  const Age = z.object({ age: z.int() }), read = program("read", s => { s.add(gen("r", { schema: Age })); });
  await playing([[opened, node(2, 0, '{"age":7}'), done(3)]], async (url, asked) => {
    assert.equal((await (await read.run(new Runtime(url), [])).value("r")).age, 7);
    const { constraint } = asked[0].body.segment.nodes[0];
    assert.deepEqual([constraint.json.type, constraint.json.required], ["object", ["age"]]);
  });
});

test("n samples, forks and joins give lists", async () => {
  const several = program("several", s => { s.add("a"); const b = s.fork(2); b.add(i => ` ${i}`, gen("g")); b.join(); });
  const of = (id, stream, text) => event(id, { type: "node_done", stream, index: 1, text, value: text, meta: {} });
  await playing([[opened, of(2, 1, "one"), of(3, 2, "two"), done(4)]], async url => {
    const state = await several.run(new Runtime(url), []);
    assert.deepEqual(await state.get("g"), ["one", "two"]);
  });
});

test("mistakes are told before anything is sent", async () => {
  assert.throws(() => gen("x", { maxToken: 4 }), /no option "maxToken"/);
  assert.throws(() => gen("x", { regex: "a", ebnf: "b" }), /one of/);
  assert.throws(() => gen("x", { toolChoice: "required" }), /needs tools/);
  assert.throws(() => gen("x", { schema: { parse: () => 1 } }), /JSON Schema/);
  const wrong = program("wrong", async s => { s.add(user("a"), select("y", ["b"])); await s.get("z"); });
  await playing([[opened, node(2, 0, ""), done(3)]], async url => { await assert.rejects(wrong.run(new Runtime(url), []), ProgramError); });
});

test("an error of the body's own is the run's, and the server is told the end", async () => {
  const broken = program("broken", s => { s.add("a", gen("x")); throw new TypeError("mine"); });
  await playing([[opened, node(2, 1, "b"), done(3)]], async (url, asked) => {
    await assert.rejects(broken.run(new Runtime(url), []), { name: "TypeError", message: "mine" });
    await until(() => asked.length);
    assert.equal(asked[0].body.segment.final, true);
  });
});
