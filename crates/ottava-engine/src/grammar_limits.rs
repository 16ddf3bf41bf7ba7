//! Limits of grammars that would take too much memory to compile. llguidance compiles rules by recursion, and its automaton for `multipleOf` has a state
//! for each remainder.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of rules in a chain in which each rule names the next one. Compiling such a chain takes up to 100 MB of stack if each rule has 29
/// groups within each other, the maximum of llguidance.
pub const MOST_CHAINED: usize = 500;

/// The maximum number of remainders for all `multipleOf` of a constraint. Compiling 10,000 remainders takes 80 ms. Compiling 100,000 takes a second and
/// more memory.
const MOST_REMAINDERS: u64 = 10_000;

/// Errors with the reason if the `multipleOf` of `schemas` need too many remainders together.
pub fn expect_few_remainders(schemas: &[Value]) -> Result<(), String> {
    let remainders = schemas.iter().map(remainders).fold(0, u64::saturating_add);
    match remainders > MOST_REMAINDERS {
        true => Err(format!(
            "the numbers of `multipleOf` have {remainders} remainders together, and at most {MOST_REMAINDERS} can be enforced; take smaller numbers"
        )),
        false => Ok(()),
    }
}

/// Errors with the reason if rules in Lark's notation are beyond a limit. Rules that cannot be read are left to llguidance, which tells the place.
pub fn expect_small(rules: &str) -> Result<(), String> {
    let Some(tokens) = tokens(rules) else { return Ok(()) };
    let chained = longest_chain(&references(&tokens));
    if chained > MOST_CHAINED {
        return Err(format!(
            "the rules have a chain of {chained} rules in which each one names the next; at most {MOST_CHAINED} are possible"
        ));
    }
    let json = |token| if let Token::Json(schema) = token { Some(schema) } else { None };
    expect_few_remainders(&tokens.into_iter().filter_map(json).collect::<Vec<_>>())
}

/// Returns the number of remainders that a grammar distinguishes to enforce each `multipleOf` of a schema. A divisor needs as many as its digits
/// without the decimal point say. If `allOf` or a reference may apply several divisors to the same number, their least common multiple counts.
fn remainders(schema: &Value) -> u64 {
    let (mut divisors, mut may_meet, mut open) = (Vec::new(), false, vec![schema]);
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                may_meet |= fields.contains_key("allOf") || fields.contains_key("$ref");
                let divisor = fields.get("multipleOf").and_then(Value::as_f64).filter(|divisor| *divisor > 0.0);
                divisors
                    .extend(divisor.map(|divisor| format!("{divisor}").replace('.', "").parse().unwrap_or(u64::MAX)));
                open.extend(fields.values());
            }
            Value::Array(list) => open.extend(list),
            _ => {}
        }
    }
    match may_meet && !divisors.is_empty() {
        true => divisors.into_iter().fold(1, common_multiple),
        false => divisors.into_iter().fold(0, u64::saturating_add),
    }
}

/// Returns the least common multiple of two positive numbers.
fn common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).saturating_mul(b)
}

/// A token of Lark's notation, as far as the limits need it.
#[derive(Debug, PartialEq)]
enum Token<'a> {
    /// The name of a rule or of a terminal.
    Name(&'a str),
    /// The schema of `%json`.
    Json(Value),
    /// `%lark`.
    Lark,
    /// Another character, or the end of a line.
    Other(char),
}

/// Divides rules in Lark's notation into tokens as llguidance does. Texts, regular expressions and comments are left out. Returns `None` if llguidance
/// refuses them too.
fn tokens(rules: &str) -> Option<Vec<Token<'_>>> {
    let (mut tokens, mut rest) = (Vec::new(), rules);
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '#' => run(rest, 0, |c| c != '\n'),
            '/' if rest.starts_with("//") => run(rest, 0, |c| c != '\n'),
            '"' => enclosed(rest, c, "i")?,
            '/' => enclosed(rest, c, "imslux")?,
            '<' => special(rest),
            '@' => run(rest, 1, |c| c.is_ascii_alphanumeric() || "_-".contains(c)),
            '0'..='9' => number(rest),
            '%' => match ["%json", "%llguidance", "%regex", "%lark"].into_iter().find(|word| rest.starts_with(word)) {
                Some("%lark") => {
                    tokens.push(Token::Lark);
                    "%lark".len()
                }
                Some(word) => {
                    let mut values = serde_json::Deserializer::from_str(&rest[word.len()..]).into_iter::<Value>();
                    let value = values.next()?.ok()?;
                    tokens.extend((word == "%json").then_some(Token::Json(value)));
                    word.len() + values.byte_offset()
                }
                None => 1,
            },
            ' ' | '\t' | '\r' => 1,
            c => match name(rest) {
                0 => {
                    tokens.push(Token::Other(c));
                    c.len_utf8()
                }
                length => {
                    tokens.push(Token::Name(&rest[..length]));
                    length
                }
            },
        };
        rest = &rest[length..];
    }
    Some(tokens)
}

/// The length of the text up to the first character after `from` for which `goes_on` is false.
fn run(text: &str, from: usize, goes_on: impl Fn(char) -> bool) -> usize {
    text[from..].find(|c| !goes_on(c)).map_or(text.len(), |at| from + at)
}

/// The length of what `mark` encloses, with both marks and the `flags` after it. A backslash escapes the character after it.
fn enclosed(text: &str, mark: char, flags: &str) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            c if c == mark => {
                let is_text = mark == '"';
                let end = run(text, at + 1, |c| flags.contains(c));
                return Some(if is_text { end.min(at + 2) } else { end });
            }
            _ => {}
        }
    }
    None
}

/// The length of a special token `<…>`, or of the character if there is none.
fn special(text: &str) -> usize {
    let end = run(text, 1, |c| !"<>".contains(c) && !c.is_whitespace());
    if end > 1 && text[end..].starts_with('>') { end + 1 } else { 1 }
}

/// The length of a number.
fn number(text: &str) -> usize {
    let is_digit = |c: char| c.is_ascii_digit();
    let hexadecimal = if text[1..].starts_with(['x', 'X']) { run(text, 2, |c| c.is_ascii_hexdigit()) } else { 0 };
    if text.starts_with('0') && hexadecimal > 2 {
        return hexadecimal;
    }
    let mut end = run(text, 0, is_digit);
    if text[end..].starts_with('.') {
        end = run(text, end + 1, is_digit);
    }
    let sign = if text[end..].starts_with(['e', 'E']) { run(text, end + 1, |c| "+-".contains(c)) } else { return end };
    if sign <= end + 2 && text[sign..].starts_with(is_digit) { run(text, sign, is_digit) } else { end }
}

/// The length of a name, in small letters of a rule or in capital letters of a terminal; 0 if there is none.
fn name(text: &str) -> usize {
    let start = usize::from(text.starts_with('_'));
    let is_part = |c: char| c.is_ascii_digit() || "_-".contains(c);
    match text[start..].chars().next() {
        Some('a'..='z') => run(text, start, |c| c.is_ascii_lowercase() || is_part(c)),
        Some('A'..='Z') => run(text, start, |c| c.is_ascii_uppercase() || is_part(c)),
        _ => 0,
    }
}

/// For each rule, the numbers of the rules that it names. Rules in `%lark {…}` are apart from the rules around them.
fn references(tokens: &[Token]) -> Vec<Vec<usize>> {
    let mut numbers: BTreeMap<(usize, &str), usize> = BTreeMap::new();
    let mut named: Vec<Vec<usize>> = Vec::new();
    // The number of the grammar at this place, and the rule that is being defined. The stack has them for each open brace.
    let (mut scope, mut rule, mut scopes, mut around) = (0, None, 0, Vec::new());
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Other('{') => {
                around.push((scope, rule));
                if at > 0 && tokens[at - 1] == Token::Lark {
                    scopes += 1;
                    (scope, rule) = (scopes, None);
                }
            }
            Token::Other('}') => (scope, rule) = around.pop().unwrap_or((scope, rule)),
            Token::Name(name) => {
                let number = *numbers.entry((scope, *name)).or_insert_with(|| {
                    named.push(Vec::new());
                    named.len() - 1
                });
                if is_definition(&tokens[at + 1..]) {
                    rule = Some(number);
                } else if let Some(rule) = rule {
                    named[rule].push(number);
                }
            }
            _ => {}
        }
    }
    named
}

/// Whether the tokens after a name make it the name of a rule that is defined: a colon, possibly after `::_` and attributes in brackets.
fn is_definition(mut after: &[Token]) -> bool {
    if let [Token::Other(':'), Token::Other(':'), Token::Other('_'), rest @ ..] = after {
        after = rest;
    }
    if let [Token::Other('['), rest @ ..] = after {
        let end = rest.iter().position(|token| matches!(token, Token::Other(']' | '\n')));
        after = end.map_or(&[], |end| &rest[end + 1..]);
    }
    matches!(after, [Token::Other(':'), ..]) && !matches!(after, [_, Token::Other(':'), ..])
}

/// The maximum number of rules in a chain in which each rule names the next one. All rules of a cycle count, and each of them once.
fn longest_chain(named: &[Vec<usize>]) -> usize {
    // Kosaraju's algorithm finds the cycles: first the order in which rules are left, then the rules from which a rule is reached.
    let mut order = Vec::new();
    let mut seen = vec![false; named.len()];
    for start in 0..named.len() {
        let mut open = vec![(start, 0)];
        while let Some((rule, next)) = open.pop() {
            if next == 0 && std::mem::replace(&mut seen[rule], true) {
                continue;
            }
            match named[rule].get(next) {
                Some(&other) => open.extend([(rule, next + 1), (other, 0)]),
                None => order.push(rule),
            }
        }
    }
    let mut naming = vec![Vec::new(); named.len()];
    for (rule, others) in named.iter().enumerate() {
        others.iter().for_each(|&other| naming[other].push(rule));
    }
    let (mut cycle_of, mut sizes) = (vec![usize::MAX; named.len()], Vec::new());
    for &start in order.iter().rev() {
        let mut open = vec![start];
        let mut size = 0;
        while let Some(rule) = open.pop() {
            if cycle_of[rule] == usize::MAX {
                (cycle_of[rule], size) = (sizes.len(), size + 1);
                open.extend(&naming[rule]);
            }
        }
        if size > 0 {
            sizes.push(size);
        }
    }
    // A cycle has a smaller number than the cycles that it names.
    let mut followed: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); sizes.len()];
    for (rule, others) in named.iter().enumerate() {
        followed[cycle_of[rule]].extend(others.iter().map(|&other| cycle_of[other]));
    }
    let mut longest = vec![0; sizes.len()];
    for cycle in (0..sizes.len()).rev() {
        let after = followed[cycle].iter().filter(|&&next| next != cycle).map(|&next| longest[next]).max();
        longest[cycle] = sizes[cycle] + after.unwrap_or(0);
    }
    longest.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chained(rules: &str) -> usize {
        longest_chain(&references(&tokens(rules).unwrap()))
    }

    #[test]
    fn chains_are_found_behind_texts_comments_and_attributes() {
        assert_eq!(chained(""), 0);
        assert_eq!(chained("start: a b\na: \"b:\" # b: c\nb: /c:\\/\nc: / | d // d: e\nd: \"x\""), 3);
        assert_eq!(chained("start: a~2..3 b{2,}\n  | [c] -> alias\na: B\nB: C+\nC: \"\\\"D\"\nb: \"x\"\nc: C"), 4);
        assert_eq!(chained("start[lazy, stop=\"x\"]: a\na::_ : b::incr(_)\nb[capture]: c\nc: <d:x/>\nd: \"\""), 4);
        assert_eq!(
            chained("%ignore /x/ start: a\n%llguidance {\"a\":\n 1} a: b\nb: %regex {\"b: c\": []}\nc: start"),
            4
        );
        // Names end where another token begins.
        assert_eq!(chained("start: \"x\"ia\na: /x/uxb\nb: x::0x1fc D~2 dE\nc: F::_\nd: c\n"), 6);
        assert_eq!(chained("start: %lark {start: a\na: b\nb: \"x\"} a\na: %json {\"b\": [\"c: d\"]} b"), 3);
    }

    #[test]
    fn all_rules_of_a_cycle_count_once() {
        assert_eq!(chained("start: a\na: b | c\nb: a\nc: a d\nd: start | e\ne: f\nf: \"x\""), 7);
        assert_eq!(chained("a: a b\nb: b"), 2);
        // Both ends of a diamond count, and one of its sides.
        assert_eq!(chained("start: a b\na: c\nb: c\nc: d\nd: \"x\""), 4);
    }

    #[test]
    fn remainders_are_summed_over_all_schemas_of_rules() {
        let rules = |numbers: &[u64]| {
            let of = |number: &u64| {
                format!(" %json {{\"type\": \"integer\", \"multipleOf\": {number}}} %lark {{start: \"x\"}}")
            };
            format!("start:{}\n", numbers.iter().map(of).collect::<String>())
        };
        expect_small(&rules(&[5000, 4999])).unwrap();
        assert!(expect_small(&rules(&[5000, 5001])).unwrap_err().contains("10001 remainders"));
        assert!(expect_small("a: \"%json {\\\"multipleOf\\\": 20000}\"").is_ok());
    }
}
