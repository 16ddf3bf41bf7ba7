//! Reading pickles as data: nothing is imported, called or executed.
//!
//! A pickle is a program for a stack machine that may call any function by its name. Here such a call becomes a [`Node::Call`] with the name
//! and the arguments, which readers of a file know by name or not at all; names that have no place in a checkpoint are errors. Nodes lie in one
//! list and refer to each other by their places, so that nothing is nested and no depth overflows a stack. What is allocated grows with the
//! bytes that are there. Protocols 2 to 5 are read: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>.

use std::collections::HashMap;

/// The place of a node; of 32 bits, since a node may take one byte of a file.
pub type Id = u32;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `None`.
    None,
    /// True or false.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes, or an integer of more than 64 bits: no reader needs either.
    Bytes,
    /// A list, tuple or set.
    List(Vec<Id>),
    /// Keys and values, in their order.
    Dict(Vec<(Id, Id)>),
    /// A class or function, as `collections.OrderedDict`.
    Global(String),
    /// A call of a class or function with these arguments, and the state that was then set.
    Call(Id, Id, Option<Id>),
    /// An object outside of the pickle.
    Persistent(Id),
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
}

/// The largest pickle; those of the largest checkpoints have some 10 MB.
pub const MAX_BYTES: u64 = 1 << 30;

/// Marks the start of the items of a list, tuple or dictionary on the stack.
const MARK: Id = Id::MAX;

impl Pickle {
    /// Reads a pickle. `knows` says whether a class or function has a place in the file.
    ///
    /// Errors, in words, for damage, for other protocols, and for a name that has no place.
    pub fn read(bytes: &[u8], knows: fn(&str) -> bool) -> Result<Pickle, String> {
        let mut machine = Machine { bytes, at: 0, nodes: Vec::new(), stack: Vec::new(), memo: HashMap::new(), knows };
        loop {
            let at = machine.at;
            let opcode = machine.take(1)?[0];
            if let Some(root) = machine.step(opcode).map_err(|reason| format!("its pickle, byte {at}: {reason}"))? {
                return Ok(Pickle { nodes: machine.nodes, root });
            }
        }
    }

    /// The value of the whole pickle.
    pub fn root(&self) -> Id {
        self.root
    }

    /// A node.
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id as usize]
    }

    /// The value of `key` in a dictionary, or among the attributes of an object.
    pub fn get(&self, id: Id, key: &str) -> Option<Id> {
        let (_, value) = self.entries(id)?.iter().rfind(|(name, _)| self.text(*name) == Some(key))?;
        Some(*value)
    }

    /// Keys and values of a dictionary, an ordered dictionary, or the attributes of an object.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(entries) => Some(entries),
            // An ordered dictionary has its entries set after the call, an object its attributes.
            Node::Call(_, _, Some(state)) => match self.node(*state) {
                Node::Dict(entries) => Some(entries),
                _ => None,
            },
            _ => None,
        }
    }

    /// A text.
    pub fn text(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An integer from 0 up.
    pub fn count(&self, id: Id) -> Option<usize> {
        match *self.node(id) {
            Node::Int(n) => usize::try_from(n).ok(),
            _ => None,
        }
    }

    /// The state that was set of an object after it was made.
    pub fn state(&self, id: Id) -> Option<Id> {
        match self.node(id) {
            Node::Call(_, _, state) => *state,
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::List(items) => Some(items),
            _ => None,
        }
    }

    /// The name of a class or function.
    pub fn global(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Global(name) => Some(name),
            _ => None,
        }
    }

    /// Name and arguments of a call.
    pub fn call(&self, id: Id) -> Option<(&str, &[Id])> {
        match self.node(id) {
            Node::Call(function, arguments, _) => Some((self.global(*function)?, self.items(*arguments)?)),
            _ => None,
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    memo: HashMap<u32, Id>,
    knows: fn(&str) -> bool,
}

impl<'a> Machine<'a> {
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

    /// An integer of `width` bytes, little endian.
    fn number(&mut self, width: u64) -> Result<u64, String> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// A text after its length, of `width` bytes.
    fn text(&mut self, width: u64) -> Result<String, String> {
        let length = self.number(width)?;
        // Python writes lone surrogates too.
        Ok(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    /// A text up to the end of its line.
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

    /// All above the last mark.
    fn items(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.stack.iter().rposition(|id| *id == MARK).ok_or("a mark is missing on the stack")?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().filter(|id| *id != MARK).ok_or_else(|| "a value is missing on the stack".into())
    }

    /// Adds items to the list or set at the top.
    fn extend(&mut self, items: Vec<Id>) -> Result<(), String> {
        let id = self.top()?;
        match self.node(id) {
            Node::List(list) => list.extend(items),
            // Other containers that are filled, as a deque.
            Node::Call(..) => {}
            _ => return Err("items are added to what is no list".into()),
        }
        Ok(())
    }

    /// Adds keys and values to the dictionary at the top.
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

    /// An integer of `width` bytes in two's complement.
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

    /// Runs one opcode. Returns the value of the pickle at its end.
    fn step(&mut self, opcode: u8) -> Result<Option<Id>, String> {
        match opcode {
            0x80 => match self.number(1)? {
                2..=5 => {}
                other => return Err(format!("protocol {other} is not read; 2 to 5 are")),
            },
            // A frame is a hint for buffers.
            0x95 => drop(self.take(8)?),
            b'.' => return self.pop().map(Some),
            b'(' => self.stack.push(MARK),
            b'0' => drop(self.stack.pop()),
            b'1' => drop(self.items()?),
            b'2' => self.stack.push(self.top()?),
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'J' => {
                let number = self.number(4)? as u32 as i32;
                self.push(Node::Int(number.into()));
            }
            b'K' | b'M' => {
                let number = self.number(if opcode == b'K' { 1 } else { 2 })?;
                self.push(Node::Int(number as i64));
            }
            0x8A | 0x8B => {
                let width = self.number(if opcode == 0x8A { 1 } else { 4 })?;
                self.long(width)?;
            }
            b'G' => {
                let bytes = self.take(8)?.try_into().expect("eight bytes were taken");
                self.push(Node::Float(f64::from_be_bytes(bytes)));
            }
            b'X' | 0x8C | 0x8D | b'T' | b'U' => {
                let width = match opcode {
                    b'X' | b'T' => 4,
                    0x8D => 8,
                    _ => 1,
                };
                let text = self.text(width)?;
                self.push(Node::Text(text));
            }
            b'B' => self.bytes(4)?,
            b'C' => self.bytes(1)?,
            0x8E | 0x96 => self.bytes(8)?,
            b']' | b')' | 0x8F => self.push(Node::List(Vec::new())),
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.items()?;
                self.extend(items)?;
            }
            b'l' | b't' | 0x91 => {
                let items = self.items()?;
                self.push(Node::List(items));
            }
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84))?,
            b'}' => self.push(Node::Dict(Vec::new())),
            b'd' => {
                let items = self.items()?;
                self.push(Node::Dict(Vec::new()));
                self.set(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![key, value])?;
            }
            b'u' => {
                let items = self.items()?;
                self.set(items)?;
            }
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
            b'R' | 0x81 => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                self.push(Node::Call(function, arguments, None));
            }
            0x92 => {
                let (_, arguments, function) = (self.pop()?, self.pop()?, self.pop()?);
                self.push(Node::Call(function, arguments, None));
            }
            b'b' => {
                let (state, id) = (self.pop()?, self.top()?);
                match *self.node(id) {
                    Node::Call(function, arguments, None) => {
                        *self.node(id) = Node::Call(function, arguments, Some(state))
                    }
                    // The attributes of an ordered dictionary are none of its entries.
                    Node::Call(.., Some(_)) => {}
                    _ => return Err("a state is set of what has none".into()),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id));
            }
            b'h' | b'j' => {
                let key = self.number(if opcode == b'h' { 1 } else { 4 })?;
                self.recall(key as u32)?;
            }
            b'q' | b'r' => {
                let key = self.number(if opcode == b'q' { 1 } else { 4 })?;
                self.remember(key as u32)?;
            }
            0x94 => self.remember(self.memo.len() as u32)?,
            other => return Err(format!("the opcode {other:#04x} is not read")),
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
