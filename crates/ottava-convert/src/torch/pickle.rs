//! Reading pickles as data: nothing is imported, called or executed.
//!
//! A pickle is a program for a stack machine that may call any function by its name. Here such a call becomes a [`Node::Call`] with the name
//! and the arguments, which readers of a file know by name or not at all; names that have no place in a checkpoint are errors. Nodes lie in one
//! list and refer to each other by their places, so that nothing is nested and no depth overflows a stack. What is allocated grows with the
//! bytes that are there. Protocols 2 to 5 are read: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>.

use super::machine::Machine;
use super::node::{Id, Node};

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
}

/// The largest pickle; pickles of the largest checkpoints have some 10 MB.
pub const MAX_BYTES: u64 = 1 << 30;

impl Pickle {
    /// Reads a pickle. `knows` says whether a class or function has a place in the file.
    ///
    /// Errors, in words, for damage, for other protocols, and for a name that has no place.
    pub fn read(bytes: &[u8], knows: fn(&str) -> bool) -> Result<Pickle, String> {
        let (nodes, root) = Machine::new(bytes, knows).run()?;
        Ok(Pickle { nodes, root })
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

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
