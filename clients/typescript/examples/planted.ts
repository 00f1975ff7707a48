// Mistakes that the compiler must find: each line that expects one fails the check if there is none.
import { z } from "zod";
import { gen, program, Runtime, select } from "sgl-client";

const Order = z.object({ item: z.string(), quantity: z.int() });
const read = program("read", (s, mail: string) => { s.add(mail, gen("order", { schema: Order })); });
const runtime = new Runtime("http://127.0.0.1:30000");
const order = gen("order", { schema: Order });

// @ts-expect-error an argument of another type
void read.run(runtime, [7]);
// @ts-expect-error an argument too many
void read.run(runtime, ["a", "b"]);
// @ts-expect-error a misspelt option
void gen("x", { maxToken: 4 });
// @ts-expect-error a value of another type
void gen("x", { temperature: "hot" });
// @ts-expect-error no such method of choosing
void select("x", ["a"], { method: "best" });

export async function values(): Promise<void> {
  const state = await read.run(runtime, ["a"]);
  const { quantity } = await state.value(order);
  const twice: number = 2 * quantity;
  // @ts-expect-error the value is no text
  const text: string = await state.value(order);
  console.log(twice, text);
}
