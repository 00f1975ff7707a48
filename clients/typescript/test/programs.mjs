// The twelve programs of examples/, recorded here: prints what each run wrote, by name, as JSON.
// node test/programs.mjs URL
import { z } from "zod";
import { agent, assistant, describeTools, gen, program, Runtime, select, system, tool, user } from "../dist/index.js";

const runtime = new Runtime(process.argv[2]);
const found = {};
const note = (name, ...texts) => { (found[name] ??= []).push(...texts); };

// quickstart
const Order = { properties: { customer: { title: "Customer", type: "string" }, item: { title: "Item", type: "string" }, quantity: { title: "Quantity", type: "integer" }, city: { title: "City", type: "string" } }, required: ["customer", "item", "quantity", "city"], title: "Order", type: "object" };
const dumps = value => Array.isArray(value) ? `[${value.map(dumps).join(", ")}]` : typeof value === "object" ? `{${Object.entries(value).map(([k, v]) => `${dumps(k)}: ${dumps(v)}`).join(", ")}}` : JSON.stringify(value);
const extractOrder = program("extract", (s, text) => {
  s.add(user(`Extract the order as JSON with this schema: ${dumps(Order)}\nText: ${text}`));
  s.add(assistant(gen("order", { schema: Order, temperature: 0, maxTokens: 96 })));
});
const SENTIMENTS = ["positive", "negative", "neutral"];
const judge = program("judge", (s, text) => {
  s.add(user(`Classify the sentiment of the text: ${SENTIMENTS.join(", ")}.\nText: ${text}`));
  s.add(assistant(select("sentiment", SENTIMENTS)));
});
const stories = program("stories", s => {
  s.add("Once upon a time, there was a little fox who lived in the forest. One day, the fox");
  const branches = s.fork(4);
  branches.add(() => gen("next", { maxTokens: 24, temperature: 0.7, stop: "\n" }));
  branches.join();
});
const expression = { type: "object", properties: { expression: { description: "The expression to evaluate", type: "string" } }, required: ["expression"], additionalProperties: false };
const sorted = ({ additionalProperties, properties, required, type }) => ({ additionalProperties, properties, required, type });
const calculator = tool({
  name: "calculate", description: "Evaluate an arithmetic expression.", parameters: sorted(expression),
  execute: given => { const [, a, sign, b] = /^\s*(\d+)\s*([*+-])\s*(\d+)\s*$/.exec(given.expression); return String(sign === "*" ? a * b : sign === "+" ? +a + +b : a - b); },
});
const ask = program("ask", (s, question) => {
  s.add(system(describeTools([calculator])));
  s.add(user(question));
  s.add(assistant(gen("call", { tools: [calculator], toolChoice: "required", temperature: 0, maxTokens: 64 })));
  s.add(assistant(gen("answer", { temperature: 0, maxTokens: 48 })));
});
{
  const order = await extractOrder.run(runtime, ["Farah Siddiqui from Leeds would like 3 desk lamps."], { seed: 1 });
  const mood = await judge.run(runtime, ["The soup was cold and the waiter rude."], { seed: 2 });
  const told = await stories.run(runtime, [], { seed: 3 });
  const asked = await ask.run(runtime, ["How much is 17 * 24?"], { seed: 4 });
  note("quickstart", await order.text(), await mood.text(), ...(await told.get("next")), await asked.text());
}
// async_agent
const WEATHER = { Lima: 19, Oslo: -3, Accra: 29 };
const temperatureIn = tool({
  name: "temperature_in", description: "The temperature in a city, in degrees Celsius.", execute: ({ city }) => `${WEATHER[city]} degrees`,
  parameters: { additionalProperties: false, properties: { city: { description: "where", enum: ["Lima", "Oslo", "Accra"], type: "string" } }, required: ["city"], type: "object" },
});
const packingList = tool({
  name: "packing_list", description: "What to pack for a kind of weather.", execute: ({ weather }) => (weather === "hot" ? ["sandals", "hat"] : ["coat", "gloves"]),
  parameters: { additionalProperties: false, properties: { weather: { enum: ["hot", "cold"], type: "string" } }, required: ["weather"], type: "object" },
});
const advise = program("advise", async (s, question) => {
  const tools = [temperatureIn, packingList];
  s.add(system(describeTools(tools)));
  s.add(user(question));
  s.add(assistant(gen("first", { tools, toolChoice: "required", maxTokens: 80 })));
  return agent(s, tools, { maxSteps: 3, maxTokens: 48 });
});
for (const [i, city] of Object.keys(WEATHER).entries()) {
  const state = await advise.run(runtime, [`What shall I pack for ${city}?`], { seed: 10 + i });
  note("async_agent", await state.text(), state.result, (await state.calls("first"))[0].result);
}
// chat
const interview = program("interview", (s, first, second) => {
  s.add(system("You answer in one short sentence."), user(first), assistant(gen("first", { maxTokens: 32 })));
  s.add(user(second), assistant(gen("second", { maxTokens: 32 })));
});
note("chat", await (await interview.run(runtime, ["Where do penguins live?", "And what do they eat?"], { seed: 5, temperature: 0.5 })).text());
// choose
const LABELS = ["praise", "complaint", "question"], METHODS = ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"];
const classify = program("classify", (s, letter) => {
  s.add(`Letter: ${letter}\nThis letter is a`);
  const branches = s.fork(METHODS.length);
  branches.add(i => select("label", LABELS.map(label => ` ${label}`), { method: METHODS[i] }));
  branches.join();
});
note("choose", ...(await (await classify.run(runtime, ["The soup was cold and so was the waiter."], { seed: 6 })).get("label")));
// extract, whose schema comes from zod
const Booking = z.object({ name: z.string().max(12), people: z.int().min(1).max(20), meal: z.enum(["lunch", "dinner"]), vegetarian: z.boolean() });
const extract = program("extract", (s, message) => { s.add(`Message: ${message}\nAs JSON: `, gen("booking", { schema: Booking, maxTokens: 256 })); });
{
  const state = await extract.run(runtime, ["Hi, this is Ada. We are four, one of us eats no meat, and we would like to come for dinner."], { seed: 7, temperature: 0 });
  const booking = await state.value("booking");
  note("extract", await state.text(), JSON.stringify([booking.name, booking.people, booking.meal, booking.vegetarian]));
}
// few_shot
const SHOTS = [["What is the capital of France?", "Paris"], ["How many legs has a spider?", "Eight"], ["Which planet is the largest?", "Jupiter"]];
const answer = program("answer", (s, question) => {
  for (const [asked, answered] of SHOTS) s.add(`Q: ${asked}\nA: ${answered}\n\n`);
  s.add(`Q: ${question}\nA:`, gen("answer", { maxTokens: 16, stop: "\n" }));
});
for (const question of ["How many days has a week?", "Who wrote Hamlet?"]) note("few_shot", await (await answer.run(runtime, [question], { seed: 8, temperature: 0.9 })).text());
// grammar
const SUM = '\nroot  ::= part op part ";"      # the whole text\npart  ::= digit{1,3} | "(" part op part ")"\nop    ::= " + " | " - "\ndigit ::= [0-9]\n';
const task = program("task", (s, topic) => { s.add(`A task about ${topic}: compute `); s.add(gen("sum", { ebnf: SUM, maxTokens: 100 })); });
note("grammar", await (await task.run(runtime, ["apples"], { temperature: 0.8, seed: 1 })).text());
// parallel_decoding
const POINTS = ["what they eat", "where they live", "how they sleep"];
const article = program("article", (s, animal) => {
  s.add(`A short article about the ${animal}.\n\n`);
  const branches = s.fork(POINTS.length);
  branches.add(i => [`One sentence on ${POINTS[i]}:`, gen("point", { maxTokens: 24, stop: ["\n", "."] })]);
  POINTS.forEach((point, i) => s.add(`- ${point}:`, branches.at(i).ref("point"), ".\n"));
  branches.join();
  s.add("In one word:", gen("summary", { maxTokens: 4 }));
});
note("parallel_decoding", await (await article.run(runtime, ["otter"], { seed: 9, temperature: 0.7 })).text());
// batch
const describe = program("describe", (s, city) => { s.add(`One sentence about ${city}:`, gen("sentence", { maxTokens: 24, stop: ["\n", "."] })); });
note("batch", ...(await Promise.all(["Lima", "Oslo", "Kyoto"].map(async (city, i) => (await describe.run(runtime, [city], { seed: 70 + i, temperature: 0.8 })).get("sentence")))));
// react
const react = program("react", async (s, question) => {
  s.add(`Question: ${question}\n`);
  for (let step = 1; step <= 4; step++) {
    s.add(`Thought ${step}:`, gen("thought", { maxTokens: 24, stop: "\n" }));
    s.add(`\nAction ${step}: `, select("action", ["calculate", "finish"]));
    if ((await s.get("action")) === "finish") break;
    s.add("(", gen("argument", { regex: "[0-9]{1,2} [+*-] [0-9]{1,2}", maxTokens: 12 }), ")");
    const [a, sign, b] = (await s.get("argument")).split(" ");
    s.add(`\nObservation ${step}: ${sign === "*" ? a * b : sign === "+" ? +a + +b : a - b}\n`);
  }
  s.add("\nAnswer:", gen("answer", { maxTokens: 8, stop: "\n" }));
});
note("react", await (await react.run(runtime, ["How much is 6 times 7, and 8 more?"], { seed: 11, temperature: 0.3 })).text());
// streaming
const story = program("story", (s, hero) => {
  s.add(`A story about a ${hero}. Once upon a time,`, gen("begin", { maxTokens: 24 }));
  s.add(" And the moral is:", gen("moral", { maxTokens: 12 }));
});
{
  const { state, done } = story.start(runtime, ["fox"], { seed: 12, stream: true });
  let streamed = "", pieces = 0;
  for await (const piece of state.pieces()) { streamed += piece; pieces++; }
  if (streamed !== (await (await done).text()) || pieces < 8) throw new Error(`streamed in ${pieces} pieces: ${streamed}`);
  note("streaming", streamed);
}
// tree_of_thought
const solve = program("solve", async (s, question) => {
  s.add(`Question: ${question}\n`);
  let leaves = [s];
  for (let step = 1; step <= 4; step++) {
    leaves = leaves.flatMap(leaf => { const pair = leaf.fork(2); pair.add(`Step ${step}:`, gen("step", { maxTokens: 8, stop: "\n" }), "\n"); return [...pair]; });
  }
  for (const leaf of leaves) leaf.add("Is this right? ", select("verdict", ["yes", "no"]));
  return leaves;
});
note("tree_of_thought", ...(await Promise.all((await solve.run(runtime, ["How many squares has a chess board?"], { seed: 13, temperature: 0.8 })).result.map(leaf => leaf.text()))));
console.log(JSON.stringify(found));
