import OpenAI from 'openai'; import { z } from 'zod'; import { zodResponseFormat } from 'openai/helpers/zod';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'; import { generateText, streamText, generateObject, tool, stepCountIs } from 'ai';
const URL = process.env.PAGODA_URL || 'http://127.0.0.1:8170', M = process.env.PAGODA_MODEL;
const c = new OpenAI({ baseURL: URL + '/v1', apiKey: 'none', maxRetries: 0 }); const ask = [{ role: 'user', content: 'What is the weather in Paris?' }];
const T = { type: 'function', function: { name: 'get_weather', parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] } } };
const p = createOpenAICompatible({ name: 'pagoda', baseURL: URL + '/v1', apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true })(M);
const W = tool({ description: 'Weather', inputSchema: z.object({ city: z.string() }), execute: async () => 'sunny' });
const F = {
  chat: async () => (await c.chat.completions.create({ model: M, messages: ask, max_tokens: 8 })).choices[0].message.content,
  stream: async () => { let n = 0; for await (const x of await c.chat.completions.create({ model: M, messages: ask, max_tokens: 8, stream: true })) n++; return n },
  parse: async () => (await c.chat.completions.parse({ model: M, messages: ask, max_tokens: 150, temperature: 0, response_format: zodResponseFormat(z.object({ city: z.string() }), 'a') })).choices[0].message.parsed,
  tools: async () => (await c.chat.completions.create({ model: M, messages: ask, tools: [T], tool_choice: 'required', max_tokens: 100 })).choices[0].message.tool_calls[0].function.arguments,
  runTools: async () => (await c.chat.completions.runTools({ model: M, messages: ask, max_tokens: 40, tools: [{ type: 'function', function: { ...T.function, function: async () => 'sunny', parse: JSON.parse } }] }).finalContent()),
  responses: async () => (await c.responses.create({ model: M, input: 'hi', max_output_tokens: 16 })).output_text,
  responsesStream: async () => { let k = []; for await (const e of await c.responses.create({ model: M, input: 'hi', max_output_tokens: 16, stream: true })) k.push(e.type); return k.at(-1) },
  files: async () => { const f = await c.files.create({ file: new File(['{"a":1}\n'], 'a.jsonl'), purpose: 'batch' }); return (await c.files.delete(f.id)).deleted },
  aiText: async () => (await generateText({ model: p, prompt: 'hi', maxOutputTokens: 8, maxRetries: 0 })).text,
  aiStream: async () => { const r = streamText({ model: p, prompt: 'hi', maxOutputTokens: 8, maxRetries: 0, onError: e => { throw e.error } }); let n = 0; for await (const x of r.textStream) n++; return [n, await r.usage] },
  aiObject: async () => (await generateObject({ model: p, prompt: 'Paris is a city', schema: z.object({ city: z.string() }), maxOutputTokens: 150, temperature: 0, maxRetries: 0 })).object,
  aiTools: async () => (await generateText({ model: p, prompt: 'Weather in Paris?', tools: { get_weather: W }, stopWhen: stepCountIs(2), maxOutputTokens: 60, maxRetries: 0 })).text,
  aiToolsRequired: async () => (await generateText({ model: p, prompt: 'Weather in Paris?', tools: { get_weather: W }, toolChoice: 'required', stopWhen: stepCountIs(2), maxOutputTokens: 100, temperature: 0, maxRetries: 0 })).steps.length,
};
for (const [n, f] of Object.entries(F)) try { console.log('PASS', n, JSON.stringify(await f()).slice(0, 90)) } catch (e) { console.log(/length limit/.test(e) ? 'TASK' : 'FAIL', n, String(e).slice(0, 400)) }
