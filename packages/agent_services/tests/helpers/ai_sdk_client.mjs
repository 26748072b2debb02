// Plays two turns with a tool and an image through the AI SDK; see
// agent_clients.py. Arguments: URL, key, data URL of an image.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, apiKey, image] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({
  name: 'tunix', baseURL, apiKey, includeUsage: true,
  supportsStructuredOutputs: true,
});

async function play(model, text, stream, output) {
  const seen = [];
  const options = {
    model,
    output,
    maxOutputTokens: 99,
    stopWhen: stepCountIs(3),
    maxRetries: 0,
    tools: { click: tool({
      description: 'Clicks.',
      inputSchema: z.object({ x: z.number().int() }),
      execute: async (given) => { seen.push(given); return 'clicked'; },
    }) },
    messages: [{ role: 'user', content: [
      { type: 'text', text },
      { type: 'file', mediaType: 'image/png', data: image },
    ] }],
  };
  const result = stream ? streamText(options) : await generateText(options);
  const final = output ? (await result.output).text : await result.text;
  return [seen[0], final];
}

const shape = Output.object({ schema: z.object({ text: z.string() }) });
console.log(JSON.stringify({
  'compatible': await play(compatible('nano'), 'a', false),
  'compatible, streamed': await play(compatible('nano'), 'b', true),
  'compatible, structured': await play(compatible('nano'), 'c', false, shape),
  'openai chat': await play(openai.chat('nano'), 'd', true),
  'openai responses': await play(openai.responses('nano'), 'e', true),
  'openai, structured': await play(openai('nano'), 'f', false, shape),
}));
