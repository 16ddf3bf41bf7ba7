//! The parts of an answer as a list of blocks, for the APIs whose answers are such lists.

use crate::format::Part;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Reasoning,
    Content,
    Call,
}

/// A block of an answer.
#[derive(Clone, Debug)]
pub struct Block {
    pub kind: BlockKind,
    /// The text, or the arguments of a call.
    pub text: String,
    /// The name of the function, if the block is a call.
    pub name: String,
    /// The id that the model gives the call.
    pub id: Option<String>,
}

/// How the list has changed. The number is the index of the block.
#[derive(Debug, PartialEq)]
pub enum Change {
    Begin(usize),
    Add(usize, String),
    End(usize),
}

/// The blocks of an answer.
#[derive(Debug, Default)]
pub struct Blocks {
    list: Vec<Block>,
    /// Whether the last block goes on.
    is_open: bool,
}

impl Blocks {
    /// The blocks so far.
    pub fn list(&self) -> &[Block] {
        &self.list
    }

    /// Adds a part.
    pub fn add(&mut self, part: Part) -> Vec<Change> {
        match part {
            Part::Reasoning(text) => self.add_text(BlockKind::Reasoning, text),
            Part::Content(text) => self.add_text(BlockKind::Content, text),
            Part::Call { name, id } => self.begin(Block { kind: BlockKind::Call, text: String::new(), name, id }),
            Part::Arguments(text) => self.add_text(BlockKind::Call, text),
            Part::EndOfCall => self.end(),
        }
    }

    fn add_text(&mut self, kind: BlockKind, text: String) -> Vec<Change> {
        let goes_on = self.is_open && self.list.last().is_some_and(|block| block.kind == kind);
        let mut changes = match goes_on {
            true => Vec::new(),
            false => self.begin(Block { kind, text: String::new(), name: String::new(), id: None }),
        };
        let index = self.list.len() - 1;
        self.list[index].text.push_str(&text);
        changes.push(Change::Add(index, text));
        changes
    }

    fn begin(&mut self, block: Block) -> Vec<Change> {
        let mut changes = self.end();
        changes.push(Change::Begin(self.list.len()));
        self.list.push(block);
        self.is_open = true;
        changes
    }

    /// Ends the last block.
    fn end(&mut self) -> Vec<Change> {
        match std::mem::take(&mut self.is_open) {
            true => vec![Change::End(self.list.len() - 1)],
            false => Vec::new(),
        }
    }

    /// Ends the list. An answer has one block at least, which may be an empty text.
    pub fn finish(&mut self) -> Vec<Change> {
        let mut changes = match self.list.is_empty() {
            true => self.add_text(BlockKind::Content, String::new()),
            false => Vec::new(),
        };
        changes.extend(self.end());
        changes
    }
}
