//! Grammars of constrained output. A grammar says which tokens may come next, so that a completion matches a JSON schema, a regular expression, one of a
//! list of texts, the rules of a grammar, or a structural tag. The crate llguidance parses over the bytes of tokens
//! (<https://github.com/guidance-ai/llguidance>).

use crate::expression::{self, literal};
use crate::gbnf::{Translated, is_gbnf, translate};
use crate::grammar_limits::{expect_few_remainders, expect_small};
use crate::reasoning::{Reasoning, ReasoningMarks, Vocabulary};
use crate::structural_tag;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use ottava_common::error::{Error, Result};
use ottava_data::Tokenizer;
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;

/// A compiler of grammars for the vocabulary of a model.
pub struct Grammars {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
}

/// A grammar and the position of a completion in it. Clones share what they learn about the vocabulary, but not the position.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// The text from which the grammar was made.
    source: Arc<str>,
    /// The reasoning before the text, until it has ended.
    reasoning: Option<Reasoning>,
}

/// The stack of the thread that compiles a grammar, in bytes. llguidance compiles by recursion; [`MOST_CHAINED`](crate::grammar_limits::MOST_CHAINED)
/// rules need less. The system gives a thread only the memory that it touches.
const STACK: usize = 256 << 20;

/// Who has written the text of a grammar.
#[derive(Clone, Copy, PartialEq)]
enum Written {
    /// The user, so errors name line and column.
    ByUser,
    /// This crate.
    Here,
}

/// The state of a completion in its grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// More tokens can follow.
    Open,
    /// The text is complete, and nothing can follow.
    Complete,
    /// No token of the vocabulary can follow, or the parser has reached its limits.
    Stuck,
}

impl Grammars {
    /// Makes a compiler for a model with `vocabulary` tokens. This takes some tenths of a second for a vocabulary of 150,000.
    ///
    /// Errors with [`Error::Model`] if the bytes of the tokenizer's tokens are not known: it must decode bytes (`ByteLevel`, `ByteFallback`).
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize) -> Result<Grammars> {
        let mut words = tokenizer.token_bytes()?;
        words.resize(vocabulary.max(words.len()), Vec::new());
        // If the tokenizer does not have an end of text, an id that no model draws is used.
        let mut ends = tokenizer.eos_ids().to_vec();
        if ends.is_empty() {
            ends.push(words.len() as u32);
            words.push(Vec::new());
        }
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, ends[0]), &words).with_eos_tokens(&ends);
        let vocabulary = Arc::new(Vocabulary { words, ends, size: vocabulary });
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| Error::Model(error.to_string()))?;
        factory.quiet();
        Ok(Grammars { factory, vocabulary })
    }

    /// Compiles a grammar of JSON that is valid by `schema`, which must be an object. Parts are separated by `, ` and `: `, because with free white
    /// space small models may write nothing else. Properties come in the order of the schema. Only references to `#/…` are supported.
    ///
    /// Errors with [`Error::Config`] for a schema that is wrong, cannot be satisfied, or has a keyword that is not implemented.
    pub fn json(&self, schema: &Value) -> Result<Grammar> {
        let schema = prepared(schema).map_err(Error::Config)?;
        let source = format!("json {schema}");
        self.compile(TopLevelGrammar::from_json_schema(schema), source, Written::Here)
    }

    /// Compiles a grammar with rules. A text that begins with `name ::=` is GBNF as llama.cpp reads it, or EBNF as xgrammar reads it; the rule `root` is
    /// the whole text. Another text is Lark as llguidance reads it, with the rule `start`.
    ///
    /// Errors with [`Error::Config`] for a grammar that is wrong or has something that is not implemented, with line and column, and for a chain of
    /// rules that is too long.
    pub fn rules(&self, text: &str) -> Result<Grammar> {
        let source = format!("rules {text}");
        if !is_gbnf(text) {
            return self.lark(text.into(), source, Written::ByUser);
        }
        match translate(text).map_err(Error::Config)? {
            Translated::Regex(expression) => {
                self.compile(TopLevelGrammar::from_regex(&expression), source, Written::Here)
            }
            Translated::Lark(rules) => self.lark(rules, source, Written::Here),
        }
    }

    /// Compiles a grammar of free text with constrained parts between tags, as xgrammar and vLLM take them: an object with `format`, or with
    /// `structures` and `triggers`.
    ///
    /// Errors with [`Error::Config`] for a tag that is wrong or has a format that is not implemented.
    pub fn structural_tag(&self, tag: &Value) -> Result<Grammar> {
        let rules = structural_tag::lark(tag, &prepared).map_err(Error::Config)?;
        self.lark(rules, format!("structural tag {tag}"), Written::Here)
    }

    /// Compiles a grammar of texts that match `expression` as a whole, in the syntax that Python and ECMAScript share.
    ///
    /// Errors with [`Error::Config`] if the expression cannot be parsed, or has an assertion or a reference to a group.
    pub fn regex(&self, expression: &str) -> Result<Grammar> {
        let translated = expression::translate(expression).map_err(Error::Config)?;
        self.compile(TopLevelGrammar::from_regex(&translated), format!("regex {expression}"), Written::Here)
    }

    /// Compiles a grammar of `texts`: the completion is one of them.
    ///
    /// Errors with [`Error::Config`] if `texts` is empty, or if one of them is empty.
    pub fn choice(&self, texts: &[&str]) -> Result<Grammar> {
        if texts.is_empty() || texts.contains(&"") {
            return Err(Error::Config("a choice has one text at least, and no empty one".into()));
        }
        self.regex(&texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join("|"))
    }

    /// Compiles rules in Lark's notation.
    fn lark(&self, rules: String, source: String, written: Written) -> Result<Grammar> {
        expect_small(&rules).map_err(Error::Config)?;
        self.compile(TopLevelGrammar::from_lark(rules), source, written)
    }

    /// Compiles a grammar in a thread of its own, because the recursion of llguidance needs a large stack.
    fn compile(&self, grammar: TopLevelGrammar, source: String, written: Written) -> Result<Grammar> {
        let compile = || {
            let matcher = Matcher::new(self.factory.create_parser(grammar));
            if let Some(reason) = matcher.get_error() {
                return Err(Error::Config(sentence(&reason, written)));
            }
            let (vocabulary, source) = (self.vocabulary.clone(), source.into());
            let mut grammar = Grammar { matcher, vocabulary, source, reasoning: None };
            match grammar.allowed() {
                Err(Place::Stuck) => Err(Error::Config("no text of the model's tokens matches it".into())),
                _ => Ok(grammar),
            }
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, compile).map_err(Error::io("the thread of a grammar"))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// Returns a schema with the options for llguidance. Errors with the reason if it cannot be enforced.
fn prepared(schema: &Value) -> std::result::Result<Value, String> {
    expect_few_remainders(std::slice::from_ref(schema))?;
    // The schema `true` is any value.
    let mut schema = if *schema == true { json!({}) } else { schema.clone() };
    let object = schema.as_object_mut().ok_or("the schema is no object")?;
    let spaces = json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
    object.insert("x-guidance".into(), spaces);
    Ok(schema)
}

/// Writes an error of llguidance as a sentence. Errors in Lark begin with `at LINE(COLUMN):`, and have lines of the grammar at their end. Lines that the
/// user has not written are left out. The reason of an error in a regular expression is in a line of its own.
fn sentence(reason: &str, written: Written) -> String {
    let first = reason.lines().next().unwrap_or_default();
    let first = match reason.lines().find_map(|line| line.strip_prefix("error: ")) {
        Some(error) if first.ends_with(':') => format!("{first} {error}"),
        _ => first.to_string(),
    };
    let placed = || {
        let rest = first.strip_prefix("at ").unwrap_or(&first);
        let (line, rest) = rest.split_once('(')?;
        let (column, _) = rest.split_once(')')?;
        let (line, column) = (line.parse::<usize>().ok()?, column.parse::<usize>().ok()?);
        let reason = first.split_once("): ")?.1;
        Some(match written {
            Written::ByUser => format!("line {line}, column {column}: {reason}"),
            Written::Here => reason.to_string(),
        })
    };
    placed().unwrap_or_else(|| first.clone())
}

impl Grammar {
    /// The same grammar, for a text that begins after reasoning. If reasoning has not begun, it may begin with its first marker if this marker is a
    /// token.
    pub fn after_reasoning(mut self, marks: ReasoningMarks) -> Grammar {
        let open = marks.open.map(|open| self.vocabulary.token(open));
        // A marker of several tokens cannot be told from the beginning of the text.
        if open != Some(None) {
            self.source = format!("after {marks:?}: {}", self.source).into();
            let then = marks.then.and_then(|then| self.vocabulary.token(then));
            self.reasoning = Some(Reasoning::new(self.vocabulary.clone(), open.flatten(), marks.close, then));
        }
        self
    }

    /// Returns which tokens of the vocabulary may come next. If no token may come next, the error says how the completion ends.
    pub(super) fn allowed(&mut self) -> std::result::Result<Allowed, Place> {
        if let Some(reasoning) = self.reasoning.as_ref().filter(|reasoning| reasoning.open.is_none()) {
            return Ok(Allowed(reasoning.allowed()));
        }
        let mut allowed = self.matcher.compute_mask_or_eos().map_err(|error| self.stuck(&error.to_string()))?;
        if let Some(open) = self.reasoning.as_ref().and_then(|reasoning| reasoning.open) {
            allowed.allow_token(open);
        }
        match allowed.first_bit_set() {
            Some(first) if first < self.vocabulary.size => Ok(Allowed(allowed)),
            // Only the end of text that no model draws is allowed.
            Some(_) if self.matcher.is_accepting().unwrap_or(false) => Err(Place::Complete),
            _ => Err(self.stuck("no token of the vocabulary goes on")),
        }
    }

    /// Advances by a token that was allowed.
    pub(super) fn push(&mut self, token: u32) -> Place {
        if let Some(reasoning) = &mut self.reasoning {
            let (is_inside, is_open) = (reasoning.open.is_none(), reasoning.open == Some(token));
            reasoning.open = None;
            if !is_inside && !is_open || is_inside && reasoning.push(token) {
                self.reasoning = None;
            }
            if is_inside || is_open {
                return Place::Open;
            }
        }
        match self.matcher.consume_token(token) {
            Err(error) => self.stuck(&error.to_string()),
            Ok(()) if self.matcher.is_stopped() && self.matcher.stop_reason().is_ok() => Place::Complete,
            Ok(()) if self.matcher.is_stopped() => self.stuck("no token of the vocabulary goes on"),
            Ok(()) => Place::Open,
        }
    }

    fn stuck(&self, reason: &str) -> Place {
        tracing::warn!("a completion within a grammar is cut off: {}", reason.lines().next().unwrap_or_default());
        Place::Stuck
    }
}

impl PartialEq for Grammar {
    fn eq(&self, other: &Grammar) -> bool {
        self.source == other.source
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Grammar").field(&self.source).finish()
    }
}

/// The set of tokens that may come next.
#[derive(Clone)]
pub struct Allowed(SimpleVob);

impl Allowed {
    /// Returns whether `token` may come next.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }

    /// Returns the tokens that may not come next, in the order of ids.
    pub fn barred(&self) -> impl Iterator<Item = u32> {
        (0..self.0.len() as u32).filter(|&token| !self.0.is_allowed(token))
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;
