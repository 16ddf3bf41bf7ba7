//! Grammars in GBNF, the notation of llama.cpp, and in the EBNF of xgrammar, which has the same form: rules `name ::= …` with texts in quotes, classes of
//! characters, groups, alternatives and repetitions. The rule `root` is the whole text.
//!
//! Such a grammar has no separate lexer: it reads character by character. llguidance's Lark notation reads lexemes, and a longer lexeme wins over a
//! shorter one, so each character becomes a lexeme of its own. A grammar without recursion becomes one regular expression, which is faster.

use crate::expression::{class_of, completed, escaped, literal};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum depth of groups, and the maximum number of repetitions.
const MOST_DEPTH: usize = 64;
const MOST_REPETITIONS: u32 = 4096;
/// The maximum depth of a regular expression of a grammar without recursion. The crate regex-syntax accepts a depth of 250, and counts two for each
/// level here.
const MOST_EXPRESSION_DEPTH: usize = 60;
/// The depth at which a group in Lark's notation becomes a rule of its own. llguidance accepts 30 groups within each other.
const MOST_LARK_DEPTH: usize = 8;
/// The maximum length of a regular expression of a grammar without recursion, in bytes.
const MOST_EXPRESSION: usize = 64 << 10;
/// Macros of xgrammar.
const MACROS: &[&str] = &["TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch"];

/// A grammar in a form that llguidance reads.
#[derive(Debug, PartialEq)]
pub enum Translated {
    /// A regular expression.
    Regex(String),
    /// Rules in Lark's notation.
    Lark(String),
}

/// A part of a rule.
#[derive(Clone, Debug)]
enum Node {
    Text(String),
    /// The inside of a class in the notation of regular expressions.
    Class(String),
    /// Any character.
    Any,
    /// A rule, and where it is named.
    Rule(String, usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// At least, and at most.
    Repeat(Box<Node>, u32, Option<u32>),
}

/// Whether `text` has the form of GBNF, and not of Lark: after comments, it begins with a rule `name ::= …`.
pub fn is_gbnf(text: &str) -> bool {
    let mut parser = Parser::new(text);
    parser.space();
    parser.begins_rule()
}

/// Translates a grammar. Errors with the reason, with line and column.
pub fn translate(text: &str) -> Result<Translated, String> {
    let mut parser = Parser::new(text);
    let mut rules = BTreeMap::new();
    parser.space();
    while parser.at < parser.chars.len() {
        let at = parser.at;
        let Some(name) = parser.rule_name() else {
            return Err(parser.wrong(at, "a rule `name ::= …` is expected"));
        };
        let node = parser.choice()?;
        if rules.insert(name.clone(), node).is_some() {
            return Err(parser.wrong(at, &format!("there is a second rule `{name}`")));
        }
    }
    if !rules.contains_key("root") {
        return Err("there is no rule `root`, which is the whole text".into());
    }
    if let Some((name, at)) = rules.values().find_map(|node| undefined(node, &rules)) {
        return Err(parser.wrong(at, &format!("there is no rule `{name}`")));
    }
    let mut expression = String::new();
    match inline(&Node::Rule("root".into(), 0), &rules, &mut Open::default(), &mut expression) {
        true => Ok(Translated::Regex(expression)),
        false => Ok(Translated::Lark(lark(&rules))),
    }
}

/// Quotes a text in Lark's notation.
pub fn quoted(text: &str) -> String {
    // JSON leaves this control character as it is, and Lark does not accept it.
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// The first name of a rule that does not exist.
fn undefined(node: &Node, rules: &BTreeMap<String, Node>) -> Option<(String, usize)> {
    match node {
        Node::Text(_) | Node::Class(_) | Node::Any => None,
        Node::Rule(name, at) => (!rules.contains_key(name)).then(|| (name.clone(), *at)),
        Node::Sequence(nodes) | Node::Choice(nodes) => nodes.iter().find_map(|node| undefined(node, rules)),
        Node::Repeat(node, ..) => undefined(node, rules),
    }
}

/// What is around a node: its rules, and the number of groups.
#[derive(Default)]
struct Open<'a> {
    rules: BTreeSet<&'a str>,
    depth: usize,
}

/// Writes a node as a regular expression. Returns false if a rule is recursive, or if the expression becomes too long or too deep.
fn inline<'a>(node: &'a Node, rules: &'a BTreeMap<String, Node>, open: &mut Open<'a>, to: &mut String) -> bool {
    if to.len() > MOST_EXPRESSION || open.depth > MOST_EXPRESSION_DEPTH {
        return false;
    }
    match node {
        Node::Text(text) => *to += &literal(text),
        Node::Class(inside) => *to += &format!("[{inside}]"),
        Node::Any => *to += "(?s:.)",
        Node::Rule(name, _) => {
            if !open.rules.insert(name) {
                return false;
            }
            let is_inlined = group(&rules[name], rules, open, to);
            open.rules.remove(name.as_str());
            return is_inlined;
        }
        Node::Sequence(nodes) => return nodes.iter().all(|node| group(node, rules, open, to)),
        Node::Choice(nodes) => {
            for (number, node) in nodes.iter().enumerate() {
                if number > 0 {
                    to.push('|');
                }
                if !group(node, rules, open, to) {
                    return false;
                }
            }
        }
        Node::Repeat(node, least, most) => {
            if !group(node, rules, open, to) {
                return false;
            }
            *to += &match most {
                Some(most) => format!("{{{least},{most}}}"),
                None => format!("{{{least},}}"),
            };
        }
    }
    true
}

fn group<'a>(node: &'a Node, rules: &'a BTreeMap<String, Node>, open: &mut Open<'a>, to: &mut String) -> bool {
    to.push_str("(?:");
    open.depth += 1;
    let is_inlined = inline(node, rules, open, to);
    open.depth -= 1;
    to.push(')');
    is_inlined
}

/// Writes rules in Lark's notation, whose names of rules have small letters only.
fn lark(rules: &BTreeMap<String, Node>) -> String {
    let numbers: BTreeMap<&str, usize> =
        rules.keys().enumerate().map(|(number, name)| (name.as_str(), number)).collect();
    let text = format!("start: r{}\n", numbers["root"]);
    let mut lark = Lark { text, count: rules.len(), numbers };
    for (number, node) in rules.values().enumerate() {
        let body = lark.node(node, 0);
        lark.text += &format!("r{number}: {body}\n");
    }
    lark.text
}

/// A grammar in Lark's notation.
struct Lark<'a> {
    /// The rules so far.
    text: String,
    /// The number of rules.
    count: usize,
    /// The numbers of the rules that have names.
    numbers: BTreeMap<&'a str, usize>,
}

impl Lark<'_> {
    /// Writes a node within `depth` groups.
    fn node(&mut self, node: &Node, depth: usize) -> String {
        if depth == MOST_LARK_DEPTH && matches!(node, Node::Sequence(_) | Node::Choice(_) | Node::Repeat(..)) {
            let number = self.count;
            self.count += 1;
            let body = self.node(node, 0);
            self.text += &format!("r{number}: {body}\n");
            return format!("r{number}");
        }
        match node {
            Node::Text(text) if text.is_empty() => "\"\"".into(),
            Node::Text(text) => text.chars().map(|c| quoted(&c.to_string())).collect::<Vec<_>>().join(" "),
            Node::Class(inside) => format!("/[{inside}]/"),
            Node::Any => "/(?s:.)/".into(),
            Node::Rule(name, _) => format!("r{}", self.numbers[name.as_str()]),
            Node::Sequence(nodes) if nodes.is_empty() => "\"\"".into(),
            Node::Sequence(nodes) => format!("({})", self.joined(nodes, " ", depth)),
            Node::Choice(nodes) => format!("({})", self.joined(nodes, " | ", depth)),
            Node::Repeat(node, least, most) => {
                let node = format!("({})", self.node(node, depth + 1));
                match (least, most) {
                    (0, None) => format!("{node}*"),
                    (1, None) => format!("{node}+"),
                    (0, Some(1)) => format!("{node}?"),
                    (least, None) => format!("{node}{{{least},}}"),
                    (_, Some(0)) => "\"\"".into(),
                    (least, Some(most)) => format!("{node}~{least}..{most}"),
                }
            }
        }
    }

    fn joined(&mut self, nodes: &[Node], by: &str, depth: usize) -> String {
        nodes.iter().map(|node| self.node(node, depth + 1)).collect::<Vec<_>>().join(by)
    }
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    depth: usize,
}

impl Parser {
    fn new(text: &str) -> Parser {
        Parser { chars: text.chars().collect(), at: 0, depth: 0 }
    }

    /// A sentence about the place `at`.
    fn wrong(&self, at: usize, reason: &str) -> String {
        let before = &self.chars[..at.min(self.chars.len())];
        let line = before.iter().filter(|&&c| c == '\n').count() + 1;
        let column = before.iter().rev().take_while(|&&c| c != '\n').count() + 1;
        format!("line {line}, column {column}: {reason}")
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn starts_with(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.chars.get(self.at + i) == Some(&c))
    }

    /// Skips white space and comments.
    fn space(&mut self) {
        while let Some(c) = self.peek() {
            match c {
                '#' => self.at += self.chars[self.at..].iter().take_while(|&&c| c != '\n').count(),
                c if c.is_whitespace() => self.at += 1,
                _ => return,
            }
        }
    }

    /// Reads a name, and white space after it.
    fn name(&mut self) -> Option<String> {
        let is_part = |c: &char| c.is_ascii_alphanumeric() || "_-".contains(*c);
        let name: String = self.chars[self.at..].iter().take_while(|c| is_part(c)).collect();
        self.at += name.len();
        self.space();
        (!name.is_empty()).then_some(name)
    }

    /// Reads the name of a rule and `::=`. Reads nothing if there is no rule.
    fn rule_name(&mut self) -> Option<String> {
        let start = self.at;
        let name = self.name().filter(|_| self.starts_with("::="));
        match name {
            Some(_) => {
                self.at += 3;
                self.space();
            }
            None => self.at = start,
        }
        name
    }

    /// Whether a rule begins here.
    fn begins_rule(&mut self) -> bool {
        let start = self.at;
        let begins = self.rule_name().is_some();
        self.at = start;
        begins
    }

    fn choice(&mut self) -> Result<Node, String> {
        self.depth += 1;
        // The body of a rule is no group.
        if self.depth > MOST_DEPTH + 1 {
            return Err(self.wrong(self.at, &format!("there are more than {MOST_DEPTH} groups within each other")));
        }
        let mut choices = vec![self.sequence()?];
        while self.peek() == Some('|') {
            self.at += 1;
            self.space();
            choices.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if choices.len() == 1 { choices.remove(0) } else { Node::Choice(choices) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut nodes = Vec::new();
        while let Some(c) = self.peek() {
            if "|)".contains(c) || self.begins_rule() {
                break;
            }
            let node = self.element(c)?;
            nodes.push(self.repeated(node)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn element(&mut self, c: char) -> Result<Node, String> {
        let start = self.at;
        let node = match c {
            '"' => {
                self.at += 1;
                let mut text = String::new();
                loop {
                    match self.peek() {
                        Some('"') => break,
                        None | Some('\n') => return Err(self.wrong(start, "a text has no quote at its end")),
                        Some(_) => text.push(self.character()?),
                    }
                }
                self.at += 1;
                Node::Text(text)
            }
            '[' => self.class()?,
            '.' => {
                self.at += 1;
                Node::Any
            }
            '(' if self.chars[self.at + 1..].iter().find(|c| !c.is_whitespace()) == Some(&'=') => {
                return Err(
                    self.wrong(start, "assertions about the text that follows are not implemented; leave them out")
                );
            }
            '(' => {
                self.at += 1;
                self.space();
                let node = self.choice()?;
                if self.peek() != Some(')') {
                    return Err(self.wrong(start, "a group has no `)` at its end"));
                }
                self.at += 1;
                node
            }
            '<' | '!' => return Err(self.wrong(start, "tokens are not implemented; write their text in quotes")),
            _ => match self.name() {
                Some(name) if MACROS.contains(&name.as_str()) && self.peek() == Some('(') => {
                    let reason =
                        format!("`{name}` is not implemented; use a structural tag for calls within free text");
                    return Err(self.wrong(start, &reason));
                }
                Some(name) => Node::Rule(name, start),
                None => return Err(self.wrong(start, &format!("{c:?} begins no part of a rule"))),
            },
        };
        self.space();
        Ok(node)
    }

    /// Reads the repetition after `node`, if there is one.
    fn repeated(&mut self, node: Node) -> Result<Node, String> {
        let start = self.at;
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.bounds()?,
            _ => return Ok(node),
        };
        let largest = most.unwrap_or(least);
        if largest > MOST_REPETITIONS || most.is_some_and(|most| most < least) {
            let reason = format!("a repetition is from 0 up to {MOST_REPETITIONS} times, the smaller number first");
            return Err(self.wrong(start, &reason));
        }
        self.at += 1;
        self.space();
        if self.peek().is_some_and(|c| "*+?{".contains(c)) {
            return Err(self.wrong(self.at, "a repetition follows a repetition; write brackets around the first one"));
        }
        Ok(Node::Repeat(Box::new(node), least, most))
    }

    /// Reads `{n}`, `{n,}`, `{,m}` or `{n,m}` up to the brace that closes it.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), String> {
        let start = self.at;
        let inside: String = self.chars[start + 1..].iter().take_while(|&&c| c != '}').collect();
        self.at += 1 + inside.chars().count();
        // The parser of Rust's integers also accepts a sign.
        let number = |text: &str| text.parse::<u32>().ok().filter(|_| !text.starts_with('+'));
        let bounds = match inside.split_once(',').map(|(least, most)| (least.trim(), most.trim())) {
            None => number(inside.trim()).map(|count| (count, Some(count))),
            Some((least, "")) => number(least).map(|least| (least, None)),
            Some(("", most)) => number(most).map(|most| (0, Some(most))),
            Some((least, most)) => number(least).zip(number(most)).map(|(least, most)| (least, Some(most))),
        };
        let bounds = bounds.filter(|_| self.peek() == Some('}'));
        bounds.ok_or_else(|| self.wrong(start, "a repetition is {n}, {n,} or {n,m} with whole numbers"))
    }

    /// Reads a class of characters.
    fn class(&mut self) -> Result<Node, String> {
        let start = self.at;
        self.at += 1;
        let mut inside = String::new();
        if self.peek() == Some('^') {
            self.at += 1;
            inside.push('^');
        }
        let empty = inside.len();
        loop {
            match self.peek() {
                Some(']') if inside.len() > empty => break,
                // xgrammar's class without exceptions.
                Some(']') if empty > 0 => {
                    self.at += 1;
                    return Ok(Node::Any);
                }
                Some(']') => return Err(self.wrong(start, "a class has no character")),
                None | Some('\n') => return Err(self.wrong(start, "a class has no `]` at its end")),
                Some(_) => {}
            }
            let letter = self.chars.get(self.at + 1).filter(|_| self.peek() == Some('\\'));
            if let Some(set) = letter.and_then(|&letter| class_of(letter, empty > 0)) {
                inside += &set;
                self.at += 2;
                // A set begins no range, so a hyphen after it is a character.
                if self.peek() == Some('-') {
                    inside += &escaped('-');
                    self.at += 1;
                }
                continue;
            }
            let (at, first) = (self.at, self.character()?);
            inside += &escaped(first);
            if self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|&c| c != ']') {
                self.at += 1;
                let last = self.character()?;
                if last < first {
                    return Err(self.wrong(at, "a range begins after its end"));
                }
                inside += &format!("-{}", escaped(last));
            }
        }
        self.at += 1;
        Ok(Node::Class(if empty > 0 { inside } else { completed(inside) }))
    }

    /// Reads a character of a text or of a class.
    fn character(&mut self) -> Result<char, String> {
        let start = self.at;
        let end = || self.wrong(start, "the grammar ends within a text or a class");
        let c = self.peek().ok_or_else(end)?;
        self.at += 1;
        if c != '\\' {
            return Ok(c);
        }
        let kind = self.peek().ok_or_else(|| self.wrong(start, "the grammar ends within a text or a class"))?;
        self.at += 1;
        let digits = match kind {
            'n' => return Ok('\n'),
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'a' => return Ok('\u{7}'),
            'b' => return Ok('\u{8}'),
            'f' => return Ok('\u{c}'),
            'v' => return Ok('\u{b}'),
            'e' => return Ok('\u{1b}'),
            '0' => return Ok('\0'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            kind if kind.is_ascii_punctuation() => return Ok(kind),
            kind => return Err(self.wrong(start, &format!("`\\{kind}` is no character"))),
        };
        let code: String = self.chars[self.at..].iter().take(digits).collect();
        self.at += code.chars().count();
        let code = u32::from_str_radix(&code, 16).ok().filter(|_| code.len() == digits && !code.starts_with('+'));
        code.and_then(char::from_u32).ok_or_else(|| self.wrong(start, "the code of a character is wrong"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expression(text: &str) -> String {
        match translate(text) {
            Ok(Translated::Regex(expression)) => expression,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_grammar_without_recursion_is_an_expression() {
        let text =
            "# a grammar\nroot ::= \"a\\\"\" b{2,} | [^a-c\\n\\]]+ # two\n  | .\nb ::= (\"x\" |\n \"\") [\\u00e4-]?\n";
        let b = "(?:(?:x)|(?:))(?:(?:[\\x{e4}\\x{2d}]){0,1})";
        let expected =
            format!("(?:(?:(?:a\\x{{22}})(?:(?:(?:{b})){{2,}}))|(?:(?:[^a-c\\x{{a}}\\x{{5d}}]){{1,}})|(?:(?s:.)))");
        assert_eq!(expression(text), expected);
        let classes = "root ::= [\\d.-] [^\\w-a] [^] \"\\f\\0\"";
        let expected = "(?:(?:[[0-9]\\x{2e}\\x{2d}])(?:[^[0-9A-Za-z_]\\x{2d}a])(?:(?s:.))(?:\\x{c}\\x{0}))";
        assert_eq!(expression(classes), expected);
    }

    #[test]
    fn a_grammar_with_recursion_has_lexemes_of_one_character() {
        let text = "root ::= \"(a\" root* \")\" | other~x\nother~x ::= [a]";
        assert!(translate(text).unwrap_err().starts_with("line 1, column 32: "));
        let text = "root ::= \"(a\" root{2,3} \")\" | ws\nws ::= [ ] ws | \"\"";
        let expected = "start: r0\nr0: ((\"(\" \"a\" (r0)~2..3 \")\") | r1)\nr1: ((/[\\x{20}]/ r1) | \"\")\n";
        assert_eq!(translate(text), Ok(Translated::Lark(expected.into())));
    }

    #[test]
    fn the_first_rule_tells_gbnf_from_lark() {
        for text in ["root ::= \"a\"", "# start: x\n\n  root ::= x", "a-b::=c"] {
            assert!(is_gbnf(text), "{text}");
        }
        for text in ["start: \"a ::= b\"", "// a ::= b\nstart: x", "start::_: x", "# a ::= b\nstart: x", ""] {
            assert!(!is_gbnf(text), "{text}");
        }
    }

    #[test]
    fn deep_groups_and_long_chains_of_rules_are_not_inlined() {
        let nested = |depth: usize| format!("root ::= {}\"a\"{}", "(\"b\" ".repeat(depth), ")?".repeat(depth));
        assert!(matches!(translate(&nested(10)), Ok(Translated::Regex(_))));
        let Ok(Translated::Lark(rules)) = translate(&nested(MOST_DEPTH)) else { panic!("the expression is too deep") };
        let depth = |line: &str| {
            let open = line.chars().scan(0, |open, c| {
                *open += i32::from(c == '(') - i32::from(c == ')');
                Some(*open)
            });
            open.max().unwrap_or(0)
        };
        assert!(rules.lines().map(depth).max().unwrap() < 20, "{rules}");
        let chain = |length: usize| {
            let rules = (0..length).map(|i| format!("r{i} ::= \"b\" r{}\n", i + 1)).collect::<String>();
            format!("root ::= r0\n{rules}r{length} ::= \"a\"")
        };
        assert!(matches!(translate(&chain(10)), Ok(Translated::Regex(_))));
        assert!(matches!(translate(&chain(21_000)), Ok(Translated::Lark(_))));
    }

    #[test]
    fn what_is_no_grammar_is_told_with_line_and_column() {
        for (text, words) in [
            ("root ::= a", "line 1, column 10: there is no rule `a`"),
            ("a ::= \"b\"", "there is no rule `root`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: there is a second rule `root`"),
            ("root ::= \"a\n\"", "line 1, column 10: a text has no quote"),
            ("root ::= [a", "line 1, column 10: a class has no `]`"),
            ("root ::= []", "line 1, column 10: a class has no character"),
            ("root ::= [b-a]", "line 1, column 11: a range begins after its end"),
            ("root ::= (\"a\"", "line 1, column 10: a group has no `)`"),
            ("root ::= \"a\" )", "line 1, column 14: a rule `name ::= …` is expected"),
            ("root ::= \"a\"{3,2}", "line 1, column 13: a repetition is from 0"),
            ("root ::= \"a\"{x}", "line 1, column 13: a repetition is {n}"),
            ("root ::= \"a\"{+3}", "line 1, column 13: a repetition is {n}"),
            ("root ::= \"a\"{1 2}", "line 1, column 13: a repetition is {n}"),
            ("root ::= \"a\"+ *", "line 1, column 15: a repetition follows a repetition"),
            (&format!("root ::= \"a\"{}", "*".repeat(200_000)), "line 1, column 14: a repetition follows"),
            ("root ::= \"\\x+f\"", "line 1, column 11: the code of a character is wrong"),
            ("root ::= \"\\q\"", "line 1, column 11: `\\q` is no character"),
            ("root ::= \"a\" (= \"b\")", "line 1, column 14: assertions"),
            ("root ::= TagDispatch((\"a\", b))", "line 1, column 10: `TagDispatch` is not implemented"),
            ("root ::= <think>", "line 1, column 10: tokens are not implemented"),
            (&format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65)), "groups within each other"),
        ] {
            let error = translate(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
