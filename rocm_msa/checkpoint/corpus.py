"""The text that a test checkpoint's tokenizer is trained on: small, built in, no network."""

from __future__ import annotations

TEXT = '''
A sparse attention layer reads only the blocks of the cache that matter to the query. The indexer
gives every block of one hundred and twenty-eight tokens a score, the largest dot product between
the index query and the index keys inside the block, and the sixteen best blocks are kept. The
newest block is always kept, because the words that came last are nearly always needed. Then the
attention runs over two thousand tokens instead of over the whole context, whether the context is
four thousand tokens long or one million. The rest of the model does not know about it.

The river came down from the hills in the spring, brown with soil and loud between its stones. In
the village below, people moved their boats under the trees and waited. The old miller said that
there was nothing to worry about; the water had been higher in his father's time, when the bridge
was still made of wood. Children counted the branches that went by and made up stories about where
they had been. By the evening the rain had stopped, the wind had turned to the north, and the first
stars were out above the church. In the morning everyone went back to work as if nothing had
happened, and the river, still brown, carried the last of the winter down to the sea.

Question: what is the capital of France? Answer: the capital of France is Paris.
Question: how many legs does a spider have? Answer: a spider has eight legs.
Question: what do plants need to grow? Answer: plants need light, water, air and some minerals.
Please write a short summary of the text above, in three sentences, and explain your reasons.
The user asked about the weather in London today, so I should call the weather tool with the city
and the date, wait for the result, and then give a short answer. Let me think about this step by
step. First, we need to find the number of apples. There are 12 boxes with 24 apples in each box,
which makes 288 apples. Then 17 apples are taken away, and 271 apples remain.

Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April,
May, June, July, August, September, October, November, December. One, two, three, four, five, six,
seven, eight, nine, ten, eleven, twelve. 0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 2026 3.14 0.5

Engineers measure before they change things. They write down what they expect, run the experiment,
and compare. When the result is not what they expected, they do not change the program until it
agrees; they look for the reason. A good test fails when the code is wrong and passes when it is
right, and it says which of the two it saw. Good documentation is short, true and easy to find.
The memory of a graphics card is large and fast, but the model is larger, and so every byte that
the cache does not use is a byte that another request can have. Four bits for a value and eight
bits for the scale of sixteen values make four and a half bits for each value on average.

def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    if n < 2:
        return n
    a, b = 0, 1
    for _ in range(n - 1):
        a, b = b, a + b
    return b


class Cache:
    def __init__(self, capacity: int = 128):
        self.capacity = capacity
        self.items = {}

    def get(self, key, default=None):
        value = self.items.get(key, default)
        return value

    def put(self, key, value):
        if len(self.items) >= self.capacity:
            raise ValueError("the cache is full")
        self.items[key] = value


import json
import torch

x = torch.zeros(16, 128, dtype=torch.float32)
y = torch.softmax(x @ x.T, dim=-1)
print(json.dumps({"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}))
for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }
if (x == NULL) return -1;
while (true) { break; }
const result = await fetch("https://example.com/api/v1/items?id=42");
<item>value</item> <name>text</name> <path>/home/user/file.txt</path> <city>London</city>
# Heading
- first item
- second item
1. One
2. Two
| name | value |
|------|-------|
| a    | 1     |

The young woman put the letter back into its envelope and looked out of the window. It was late in
the afternoon and the street was almost empty. A man with a dog walked slowly past the baker's shop,
stopped, read something on the door and went on. She had known for years that this day would come,
and now that it was here she felt neither sad nor happy, only awake. She took her coat, closed the
door behind her and walked towards the station without looking back. The train was on time. On the
other side of the glass the fields were green, then yellow, then green again, and there were horses
under the trees. Somebody in the next carriage was singing. When she arrived it was already dark,
but her brother was there, just as he had promised, holding a lamp and smiling.
'''
