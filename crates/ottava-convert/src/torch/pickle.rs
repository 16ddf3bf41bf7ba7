//! Reading pickles as data: nothing is imported, called or executed.
//!
//! A pickle is a program for a stack machine, which may call any function by its name. Here, a call becomes a [`Node::Call`] with the name and the
//! arguments. Readers of a file know the names that they need, and names that do not belong in a checkpoint are errors. Nodes are in one list and
//! refer to each other by index, so no depth overflows the stack. Memory grows only with the bytes that were read. Supports the protocols 2 to 5:
//! <https://github.com/python/cpython/blob/main/Lib/pickletools.py>.

use super::machine::Machine;
use super::node::{Id, Node};

/// A pickle as data.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
}

/// The maximum size of a pickle in bytes. Pickles of the largest checkpoints have about 10 MB.
pub const MAX_BYTES: u64 = 1 << 30;

impl Pickle {
    /// Reads a pickle. `knows` says whether a class or function may occur in the file.
    ///
    /// Errors with a description if the pickle is damaged, has another protocol, or has a name that may not occur.
    pub fn read(bytes: &[u8], knows: fn(&str) -> bool) -> Result<Pickle, String> {
        let (nodes, root) = Machine::new(bytes, knows).run()?;
        Ok(Pickle { nodes, root })
    }

    /// Returns the value of the whole pickle.
    pub fn root(&self) -> Id {
        self.root
    }

    /// Returns a node.
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id as usize]
    }

    /// Returns the value of `key` in a dictionary, or among the attributes of an object.
    pub fn get(&self, id: Id, key: &str) -> Option<Id> {
        let (_, value) = self.entries(id)?.iter().rfind(|(name, _)| self.text(*name) == Some(key))?;
        Some(*value)
    }

    /// Returns the entries of a (possibly ordered) dictionary, or the attributes of an object.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(entries) => Some(entries),
            // The entries of an ordered dictionary and the attributes of an object are set after the call.
            Node::Call(_, _, Some(state)) => match self.node(*state) {
                Node::Dict(entries) => Some(entries),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns a text.
    pub fn text(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns an integer that is at least 0.
    pub fn count(&self, id: Id) -> Option<usize> {
        match *self.node(id) {
            Node::Int(n) => usize::try_from(n).ok(),
            _ => None,
        }
    }

    /// Returns the state that was set after an object was created.
    pub fn state(&self, id: Id) -> Option<Id> {
        match self.node(id) {
            Node::Call(_, _, state) => *state,
            _ => None,
        }
    }

    /// Returns the items of a list or tuple.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::List(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the name of a class or function.
    pub fn global(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Global(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the name and the arguments of a call.
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
