//! The records of a `.json` file: the elements of a list, or consecutive values. Each record is cut out of the file without parsing it.

use std::io::BufRead;

/// Divides a file into its records.
#[derive(Default)]
pub(super) struct JsonValues {
    /// Whether the file is one list; `None` before its first byte was read.
    in_list: Option<bool>,
    /// Whether the list has ended.
    ended: bool,
    /// The line that is being read, counted from 1.
    pub(super) line: u64,
}

impl JsonValues {
    /// Returns the next record and the line on which it starts; `None` at the end. Errors with the reason, also if the record has more than
    /// `max_bytes` bytes.
    pub(super) fn next(&mut self, input: &mut dyn BufRead, max_bytes: u64) -> Result<Option<(Vec<u8>, u64)>, String> {
        self.line = self.line.max(1);
        let Some(start) = self.start(input)? else { return Ok(None) };
        let (mut record, line) = (Vec::new(), self.line);
        let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
        loop {
            let bytes = input.fill_buf().map_err(|error| format!("cannot be read further: {error}"))?;
            if bytes.is_empty() {
                // A record that begins with an unexpected byte extends to the end of the file; the parser then reports what is wrong.
                return Ok(Some((record, line)));
            }
            let mut used = 0;
            let mut complete = false;
            for &byte in bytes {
                if depth == 0
                    && !record.is_empty()
                    && !quoted
                    && (byte == b',' || byte == b']' || byte.is_ascii_whitespace())
                {
                    complete = true;
                    break;
                }
                used += 1;
                self.line += u64::from(byte == b'\n');
                record.push(byte);
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if quoted => escaped = true,
                    b'"' => quoted = !quoted,
                    b'{' | b'[' if !quoted => depth += 1,
                    b'}' | b']' if !quoted => {
                        depth = depth.saturating_sub(1);
                        complete = depth == 0;
                    }
                    _ => {}
                }
                if complete {
                    break;
                }
            }
            input.consume(used);
            if record.len() as u64 > max_bytes {
                return Err(format!("a document of more than {} MiB", max_bytes >> 20));
            }
            if complete {
                debug_assert!(record.first() == Some(&start));
                return Ok(Some((record, line)));
            }
        }
    }

    /// Returns the first byte of the next record without consuming it; `None` at the end.
    fn start(&mut self, input: &mut dyn BufRead) -> Result<Option<u8>, String> {
        loop {
            let bytes = input.fill_buf().map_err(|error| format!("cannot be read further: {error}"))?;
            let Some(&byte) = bytes.first() else {
                return match self.in_list == Some(true) && !self.ended {
                    true => Err("the list does not end; the file is cut off".into()),
                    false => Ok(None),
                };
            };
            let is_mark = self.in_list.is_none() && bytes.starts_with(b"\xEF\xBB\xBF");
            match byte {
                _ if is_mark => input.consume(3),
                b'\n' | b' ' | b'\t' | b'\r' => {
                    self.line += u64::from(byte == b'\n');
                    input.consume(1);
                }
                _ if self.ended => return Err("text after the end of the list".into()),
                b'[' if self.in_list.is_none() => {
                    self.in_list = Some(true);
                    input.consume(1);
                }
                b',' if self.in_list == Some(true) => input.consume(1),
                b']' if self.in_list == Some(true) => {
                    self.ended = true;
                    input.consume(1);
                }
                _ => {
                    self.in_list.get_or_insert(false);
                    return Ok(Some(byte));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Result<Vec<(String, u64)>, String> {
        let (mut values, mut found) = (JsonValues::default(), Vec::new());
        // The buffer is small, so that records span several fills.
        let mut input = std::io::BufReader::with_capacity(3, text.as_bytes());
        while let Some((record, line)) = values.next(&mut input, 1 << 20)? {
            found.push((String::from_utf8(record).unwrap(), line));
        }
        Ok(found)
    }

    #[test]
    fn lists_and_values_are_cut_into_records() {
        let list = "[\n {\"a\": \"x]},\\\"\"},\n\n {\"b\": [1, {}]} , 3, \"s t\"\n]\n";
        let expected = [("{\"a\": \"x]},\\\"\"}", 2), ("{\"b\": [1, {}]}", 4), ("3", 4), ("\"s t\"", 4)];
        assert_eq!(cut(list).unwrap(), expected.map(|(text, line)| (text.to_string(), line)));
        let lines = cut("{\"a\": 1}\n{\"a\":\n 2}{\"a\": 3}").unwrap();
        assert_eq!(lines.iter().map(|(_, line)| *line).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((cut("").unwrap().len(), cut("[]").unwrap().len(), cut("\u{feff}[{}]").unwrap().len()), (0, 0, 1));
        assert!(cut("[{}").unwrap_err().contains("cut off"));
        assert!(cut("[] x").unwrap_err().contains("after the end"));
        let mut input = "[{\"a\"".as_bytes();
        let first = JsonValues::default().next(&mut input, 99).unwrap();
        assert_eq!(first, Some((b"{\"a\"".to_vec(), 1)), "the parser names what is wrong with it");
    }
}
