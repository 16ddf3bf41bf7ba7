//! The stack machine of pickles. A call becomes a node, and nothing is called.

use super::node::{Id, Node};
use std::collections::HashMap;

/// The marker of the start of the items of a list, tuple or dictionary on the stack.
const MARK: Id = Id::MAX;

/// Reads opcodes, and creates a node for each value.
pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    memo: HashMap<u32, Id>,
    knows: fn(&str) -> bool,
}

impl<'a> Machine<'a> {
    /// Creates a machine before the first opcode. `knows` says whether a class or function may occur in the file.
    pub(super) fn new(bytes: &'a [u8], knows: fn(&str) -> bool) -> Machine<'a> {
        Machine { bytes, at: 0, nodes: Vec::new(), stack: Vec::new(), memo: HashMap::new(), knows }
    }

    /// Returns all nodes, and the value of the whole pickle.
    pub(super) fn run(mut self) -> Result<(Vec<Node>, Id), String> {
        loop {
            let at = self.at;
            let opcode = self.take(1)?[0];
            if let Some(root) = self.step(opcode).map_err(|reason| format!("its pickle, byte {at}: {reason}"))? {
                return Ok((self.nodes, root));
            }
        }
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(count).ok().filter(|count| *count <= rest.len()) {
            Some(count) => {
                self.at += count;
                Ok(&rest[..count])
            }
            None => Err("its pickle is cut off".into()),
        }
    }

    /// Reads an integer of `width` bytes, little-endian.
    fn number(&mut self, width: u64) -> Result<u64, String> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Reads a text after its length, which has `width` bytes.
    fn text(&mut self, width: u64) -> Result<String, String> {
        let length = self.number(width)?;
        // Python also writes lone surrogates, which are not valid UTF-8.
        Ok(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    /// Reads a text up to the end of its line.
    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or("its pickle is cut off")?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| "a name is not UTF-8".to_string())
    }

    fn pop(&mut self) -> Result<Id, String> {
        self.stack.pop().filter(|id| *id != MARK).ok_or_else(|| "a value is missing on the stack".into())
    }

    fn push(&mut self, node: Node) {
        let id = self.add(node);
        self.stack.push(id);
    }

    fn add(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        (self.nodes.len() - 1) as Id
    }

    fn node(&mut self, id: Id) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    /// Takes all items above the last mark.
    fn items(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.stack.iter().rposition(|id| *id == MARK).ok_or("a mark is missing on the stack")?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().filter(|id| *id != MARK).ok_or_else(|| "a value is missing on the stack".into())
    }

    /// Adds items to the list or set at the top of the stack.
    fn extend(&mut self, items: Vec<Id>) -> Result<(), String> {
        let id = self.top()?;
        match self.node(id) {
            Node::List(list) => list.extend(items),
            // Items of other containers, such as a deque, are ignored.
            Node::Call(..) => {}
            _ => return Err("items are added to what is no list".into()),
        }
        Ok(())
    }

    /// Adds keys and values to the dictionary at the top of the stack.
    fn set(&mut self, items: Vec<Id>) -> Result<(), String> {
        let pairs = items.chunks_exact(2);
        if !pairs.remainder().is_empty() {
            return Err("a key has no value".into());
        }
        let pairs: Vec<_> = pairs.map(|pair| (pair[0], pair[1])).collect();
        let id = self.top()?;
        let id = match *self.node(id) {
            Node::Call(.., Some(state)) => state,
            Node::Call(function, arguments, None) => {
                let state = self.add(Node::Dict(Vec::new()));
                *self.node(id) = Node::Call(function, arguments, Some(state));
                state
            }
            _ => id,
        };
        match self.node(id) {
            Node::Dict(entries) => entries.extend(pairs),
            _ => return Err("keys are set in what is no dictionary".into()),
        }
        Ok(())
    }

    fn name(&mut self, module: &str, name: &str) -> Result<(), String> {
        let full = format!("{module}.{name}");
        match (self.knows)(&full) {
            true => self.push(Node::Global(full)),
            false => {
                return Err(format!(
                    "it refers to `{full}`, which has no place in a checkpoint and may be code; nothing of it was run. If you trust the file, \
                     load it in Python and save its tensors as safetensors"
                ));
            }
        }
        Ok(())
    }

    fn remember(&mut self, key: u32) -> Result<(), String> {
        let id = self.top()?;
        self.memo.insert(key, id);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let id = self.memo.get(&key).ok_or_else(|| format!("there is no value {key} in its memo"))?;
        self.stack.push(*id);
        Ok(())
    }

    /// Reads an integer of `width` bytes in two's complement.
    fn long(&mut self, width: u64) -> Result<(), String> {
        let bytes = self.take(width)?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        self.push(match bytes.len() {
            0..=8 => {
                let start = if negative { -1i64 } else { 0 };
                Node::Int(bytes.iter().rev().fold(start, |number, byte| number << 8 | i64::from(*byte)))
            }
            _ => Node::Bytes,
        });
        Ok(())
    }

    fn bytes(&mut self, width: u64) -> Result<(), String> {
        let length = self.number(width)?;
        self.take(length)?;
        self.push(Node::Bytes);
        Ok(())
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        items.reverse();
        self.push(Node::List(items));
        Ok(())
    }

    /// Runs one opcode. At the end of the pickle, returns its value.
    fn step(&mut self, opcode: u8) -> Result<Option<Id>, String> {
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => match self.number(1)? {
                2..=5 => {}
                other => return Err(format!("protocol {other} is not read; 2 to 5 are")),
            },
            // A frame is only a hint for buffering.
            0x95 => drop(self.take(8)?),
            b'(' => self.stack.push(MARK),
            b'0' => drop(self.stack.pop()),
            b'1' => drop(self.items()?),
            b'2' => self.stack.push(self.top()?),
            b'h' | b'j' | b'q' | b'r' | 0x94 => self.memo(opcode)?,
            b'N' | 0x88 | 0x89 | b'J' | b'K' | b'M' | 0x8A | 0x8B | b'G' => self.constant(opcode)?,
            b'X' | 0x8C | 0x8D | b'T' | b'U' | b'B' | b'C' | 0x8E | 0x96 => self.text_or_bytes(opcode)?,
            b']' | b')' | 0x8F | b'a' | b'e' | 0x90 | b'l' | b't' | 0x91 | 0x85..=0x87 => self.list(opcode)?,
            b'}' | b'd' | b's' | b'u' => self.dictionary(opcode)?,
            b'c' | 0x93 | b'R' | 0x81 | 0x92 | b'b' | b'Q' => self.object(opcode)?,
            other => return Err(format!("the opcode {other:#04x} is not read")),
        }
        Ok(None)
    }

    /// Stores the value at the top of the stack in the memo, or recalls a value.
    fn memo(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            b'h' | b'j' => {
                let key = self.number(if opcode == b'h' { 1 } else { 4 })?;
                self.recall(key as u32)
            }
            b'q' | b'r' => {
                let key = self.number(if opcode == b'q' { 1 } else { 4 })?;
                self.remember(key as u32)
            }
            _ => self.remember(self.memo.len() as u32),
        }
    }

    /// Reads None, a boolean or a number.
    fn constant(&mut self, opcode: u8) -> Result<(), String> {
        let node = match opcode {
            b'N' => Node::None,
            0x88 => Node::Bool(true),
            0x89 => Node::Bool(false),
            b'J' => Node::Int((self.number(4)? as u32 as i32).into()),
            b'K' | b'M' => Node::Int(self.number(if opcode == b'K' { 1 } else { 2 })? as i64),
            0x8A | 0x8B => {
                let width = self.number(if opcode == 0x8A { 1 } else { 4 })?;
                return self.long(width);
            }
            _ => {
                let bytes = self.take(8)?.try_into().expect("eight bytes were taken");
                Node::Float(f64::from_be_bytes(bytes))
            }
        };
        self.push(node);
        Ok(())
    }

    fn text_or_bytes(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            b'B' => self.bytes(4),
            b'C' => self.bytes(1),
            0x8E | 0x96 => self.bytes(8),
            _ => {
                let width = match opcode {
                    b'X' | b'T' => 4,
                    0x8D => 8,
                    _ => 1,
                };
                let text = self.text(width)?;
                self.push(Node::Text(text));
                Ok(())
            }
        }
    }

    /// Creates a list, tuple or set, or adds items to the one at the top of the stack.
    fn list(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])
            }
            b'e' | 0x90 => {
                let items = self.items()?;
                self.extend(items)
            }
            b'l' | b't' | 0x91 => {
                let items = self.items()?;
                self.push(Node::List(items));
                Ok(())
            }
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84)),
            _ => {
                self.push(Node::List(Vec::new()));
                Ok(())
            }
        }
    }

    /// Creates a dictionary, or sets keys of the one at the top of the stack.
    fn dictionary(&mut self, opcode: u8) -> Result<(), String> {
        let items = match opcode {
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                vec![key, value]
            }
            b'd' | b'u' => self.items()?,
            _ => Vec::new(),
        };
        if matches!(opcode, b'}' | b'd') {
            self.push(Node::Dict(Vec::new()));
        }
        self.set(items)
    }

    /// Reads a class or function, a call, the state of an object, or an object outside the pickle.
    fn object(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.name(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let mut text = |id: Id| match self.node(id) {
                    Node::Text(text) => Ok(text.clone()),
                    _ => Err("a name is no text"),
                };
                let (module, name) = (text(module)?, text(name)?);
                self.name(&module, &name)?;
            }
            b'b' => {
                let state = self.pop()?;
                self.set_state(state)?;
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id));
            }
            // Opcode 0x92 is a call with named arguments too, which are never read.
            _ => {
                if opcode == 0x92 {
                    self.pop()?;
                }
                let (arguments, function) = (self.pop()?, self.pop()?);
                self.push(Node::Call(function, arguments, None));
            }
        }
        Ok(())
    }

    /// Sets the state of the object at the top of the stack.
    fn set_state(&mut self, state: Id) -> Result<(), String> {
        let id = self.top()?;
        match *self.node(id) {
            Node::Call(function, arguments, None) => *self.node(id) = Node::Call(function, arguments, Some(state)),
            // The attributes of an ordered dictionary are not entries of the dictionary.
            Node::Call(.., Some(_)) => {}
            _ => return Err("a state is set of what has none".into()),
        }
        Ok(())
    }
}
