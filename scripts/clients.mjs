// Checks that clients of npm work with `ottava serve`: their ordinary calls, with their defaults. scripts/clients.py starts the server and this script.
// Prints the versions and one line per check; exit status 1 if one fails.
//
// usage: node clients.mjs URL KEY MODEL FOLDER    FOLDER has the packages openai, ai, @ai-sdk/openai, @anthropic-ai/sdk and zod
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [url, key, model, folder] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { z } = require("zod");
const ASK = "Where is the otter?";
const Dive = z.object({ depth: z.enum(["3", "5", "8"]), again: z.boolean() });

async function* openaiChats() {
  const { OpenAI } = require("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  const messages = [{ role: "user", content: ASK }];
  const whole = await client.chat.completions.create({ model, messages, max_completion_tokens: 8, temperature: 0 });
  yield ["chat", whole.usage.completion_tokens === 8];
  let text = "";
  for await (const piece of await client.chat.completions.create({ model, messages, max_completion_tokens: 8, temperature: 0, stream: true })) {
    text += piece.choices[0]?.delta?.content ?? "";
  }
  yield ["stream", text === (whole.choices[0].message.content ?? "")];
  const response = await client.responses.create({ model, input: ASK, max_output_tokens: 16 });
  yield ["response", response.usage.output_tokens > 0];
}

async function* aiSdk() {
  const { createOpenAI } = require("@ai-sdk/openai");
  const { generateText, generateObject, streamText } = require("ai");
  const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
  for (const [name, of] of [["responses", provider(model)], ["chat", provider.chat(model)]]) {
    const options = { model: of, prompt: ASK, maxOutputTokens: 16, maxRetries: 0 };
    yield [`text by ${name}`, (await generateText(options)).usage.outputTokens > 0];
    const stream = streamText(options);
    for await (const _ of stream.textStream);
    yield [`stream by ${name}`, (await stream.usage).outputTokens > 0];
    const { object } = await generateObject({ model: of, prompt: ASK, schema: Dive, maxRetries: 0 });
    yield [`object by ${name}`, Dive.safeParse(object).success];
  }
}

async function* anthropic() {
  const Anthropic = require("@anthropic-ai/sdk");
  const client = new (Anthropic.default ?? Anthropic)({ baseURL: url, apiKey: key, maxRetries: 0 });
  const options = { model, max_tokens: 8, messages: [{ role: "user", content: ASK }] };
  yield ["message", (await client.messages.create(options)).usage.output_tokens > 0];
  yield ["stream", (await client.messages.stream(options).finalMessage()).usage.output_tokens > 0];
  const begun = { ...options, messages: [...options.messages, { role: "assistant", content: "It swims" }] };
  yield ["beginning of the answer", (await client.messages.create(begun)).content[0].type === "text"];
}

let failed = false;
for (const [packages, checks] of [[["openai"], openaiChats], [["ai", "@ai-sdk/openai"], aiSdk], [["@anthropic-ai/sdk"], anthropic]]) {
  const version = name => JSON.parse(readFileSync(`${folder}/node_modules/${name}/package.json`, "utf8")).version;
  console.log(packages.map(name => `${name} ${version(name)}`).join(", "));
  try {
    for await (const [what, passed] of checks()) {
      failed ||= !passed;
      console.log(`${passed ? "ok    " : "FAILED"} ${checks.name}: ${what}`);
    }
  } catch (error) {
    failed = true;
    console.log(`FAILED ${checks.name}: ${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
