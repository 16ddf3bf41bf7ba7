//! Lists of texts and numbers as Python prints them, which templates such as `{{ choices.text }}` render.

use serde_json::{Number, Value};

/// Returns the texts and numbers of a Python list such as `['a', "b", 1]`. Returns `None` for any other text.
pub(crate) fn list(source: &str) -> Option<Vec<Value>> {
    let mut rest = source.trim().strip_prefix('[')?.trim_start();
    let mut all = Vec::new();
    loop {
        if let Some(after) = rest.strip_prefix(']') {
            return after.is_empty().then_some(all);
        }
        let (value, after) = match quoted(rest) {
            Some((text, after)) => (Value::String(text), after),
            None => number(rest)?,
        };
        all.push(value);
        rest = after.trim_start();
        match rest.strip_prefix(',') {
            Some(after) => rest = after.trim_start(),
            None if rest.starts_with(']') => {}
            None => return None,
        }
    }
}

/// Reads a number in the notation of JSON, and returns it with the rest of the source.
fn number(source: &str) -> Option<(Value, &str)> {
    let (digits, after) = source.split_at(source.find([',', ']'])?);
    digits.trim_end().parse::<Number>().ok().map(|number| (Value::Number(number), after))
}

/// Reads a text in quotes, and returns it with the rest of the source.
fn quoted(source: &str) -> Option<(String, &str)> {
    let quote = source.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let (mut text, mut chars) = (String::new(), source[1..].chars());
    loop {
        match chars.next()? {
            '\\' => text.push(escaped(&mut chars)?),
            c if c == quote => return Some((text, chars.as_str())),
            c => text.push(c),
        }
    }
}

/// Reads what follows a backslash.
fn escaped(chars: &mut std::str::Chars) -> Option<char> {
    let digits = match chars.next()? {
        'n' => return Some('\n'),
        't' => return Some('\t'),
        'r' => return Some('\r'),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        c => return matches!(c, '\\' | '\'' | '"').then_some(c),
    };
    let code: String = chars.by_ref().take(digits).collect();
    char::from_u32(u32::from_str_radix(&code, 16).ok().filter(|_| code.len() == digits)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_of_python_are_read() {
        assert_eq!(list("['a', \"it's\", 'b\\n\\x00\\u20ac']").unwrap(), ["a", "it's", "b\n\0€"]);
        assert_eq!(list("[1, -2.5 ,'3']").unwrap(), [json!(1), json!(-2.5), json!("3")]);
        assert_eq!(list("[ ]"), Some(Vec::new()));
        for other in ["a", "['a'", "[a]", "[1 2]", "[,]", "['a' 'b']", "['a'] b", "['\\q']", "['\\x1']"] {
            assert_eq!(list(other), None, "{other}");
        }
    }
}
