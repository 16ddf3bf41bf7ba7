//! Runs the statements of a template.

use std::sync::Arc;

use crate::arguments::CallArguments;
use crate::ast::{Expression, ExpressionKind, FilterCall, For, Macro, Statement, StatementKind, Target};
use crate::error::{Result, fail};
use crate::eval::{Loop, Object, Rendering};
use crate::limits::check_text;
use crate::value::{MARKS, Value};
use crate::{items, text};

/// What a loop does after a statement.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Rendering<'t> {
    /// Appends to the rendered text.
    fn emit(&mut self, text: &str) -> Result<()> {
        self.limits.room_for_text(text.len())?;
        check_text(self.out.len() + text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    pub(crate) fn statements(&mut self, body: &'t [Statement]) -> Result<Flow> {
        for statement in body {
            let flow = match &statement.kind {
                StatementKind::Data(text) => self.emit(text).map(|()| Flow::Next),
                kind => self.deeper(statement.line, |rendering| rendering.statement(kind)),
            }?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Dispatches to small functions, because the stack has the frames of all enclosing blocks.
    fn statement(&mut self, kind: &'t StatementKind) -> Result<Flow> {
        let done = match kind {
            StatementKind::Data(text) => self.emit(text),
            StatementKind::Print(value) => self.print(value),
            StatementKind::If { branches, otherwise } => return self.conditional(branches, otherwise),
            StatementKind::For(statement) => self.start_loop(statement),
            StatementKind::Set(target, value) => self.evaluate(value).and_then(|value| self.set(target, value)),
            StatementKind::SetBlock(target, filters, body) => {
                self.filtered_text(filters, body).and_then(|value| self.set(target, value))
            }
            StatementKind::With(values, body) => return self.with(values, body),
            StatementKind::Filter(filters, body) => self.filter_block(filters, body),
            StatementKind::Macro(defined) => self.define(defined).and_then(|value| self.assign(&defined.name, value)),
            StatementKind::Call(body, call) => self.call_block(body, call),
            StatementKind::Generation(body) => self.generation(body),
            StatementKind::Block(body) => return self.with(&[], body),
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
        };
        done.map(|()| Flow::Next)
    }

    fn print(&mut self, value: &'t Expression) -> Result<()> {
        let value = self.evaluate_used(value)?;
        self.emit_value(&value)
    }

    fn emit_value(&mut self, value: &Value) -> Result<()> {
        let text = text::string(value, &self.limits)?;
        self.emit(&text)
    }

    fn conditional(
        &mut self,
        branches: &'t [(Expression, Vec<Statement>)],
        otherwise: &'t [Statement],
    ) -> Result<Flow> {
        for (test, body) in branches {
            if self.evaluate_used(test)?.is_true() {
                return self.statements(body);
            }
        }
        self.statements(otherwise)
    }

    fn start_loop(&mut self, statement: &'t For) -> Result<()> {
        let items = self.evaluate_used(&statement.items)?;
        self.for_loop(statement, &items, 0, self.current_scope())
    }

    fn filter_block(&mut self, filters: &'t [FilterCall], body: &'t [Statement]) -> Result<()> {
        let value = self.filtered_text(filters, body)?;
        self.emit_value(&value)
    }

    fn generation(&mut self, body: &'t [Statement]) -> Result<()> {
        let text = self.capture_within(body)?;
        let [begin, end] = MARKS.map(String::from);
        self.emit(&begin)?;
        self.emit_value(&text)?;
        self.emit(&end)
    }

    /// Returns the text that `body` renders.
    pub(crate) fn capture(&mut self, body: &'t [Statement]) -> Result<Value> {
        let outside = std::mem::take(&mut self.out);
        self.statements(body)?;
        let text = std::mem::replace(&mut self.out, outside);
        self.limits.text(text)
    }

    /// Returns the text that `body` renders in a new scope.
    fn capture_within(&mut self, body: &'t [Statement]) -> Result<Value> {
        let outside = self.enter(self.current_scope())?;
        let text = self.capture(body)?;
        self.leave(outside);
        Ok(text)
    }

    /// Returns the text that `body` renders, after `filters`.
    fn filtered_text(&mut self, filters: &'t [FilterCall], body: &'t [Statement]) -> Result<Value> {
        let mut value = self.capture_within(body)?;
        for filter in filters {
            let arguments = self.arguments(&filter.arguments)?;
            value = self.filter(&filter.name, &value, &arguments).map_err(|failure| failure.at(filter.line))?;
        }
        Ok(value)
    }

    fn with(&mut self, values: &'t [(Target, Expression)], body: &'t [Statement]) -> Result<Flow> {
        let mut assigned = Vec::new();
        for (target, value) in values {
            assigned.push((target, self.evaluate(value)?));
        }
        let outside = self.enter(self.current_scope())?;
        for (target, value) in assigned {
            self.set(target, value)?;
        }
        let flow = self.statements(body)?;
        self.leave(outside);
        Ok(flow)
    }

    fn define(&mut self, defined: &'t Macro) -> Result<Value> {
        self.capture_scopes();
        self.object(Object::Macro(defined, self.current_scope()))
    }

    fn call_block(&mut self, body: &'t Macro, call: &'t Expression) -> Result<()> {
        let ExpressionKind::Call(callee, arguments) = &call.kind else { unreachable!("the parser has looked") };
        let callee = self.evaluate(callee)?;
        let CallArguments { positional, mut named } = self.arguments(arguments)?;
        named.push(("caller".into(), self.define(body)?));
        let value = self.call(&callee, CallArguments { positional, named })?;
        self.emit_value(&value)
    }

    fn set(&mut self, target: &'t Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.assign(name, value),
            Target::Attribute(name, attribute) => self.set_attribute(name, attribute, value),
            Target::Tuple(targets) => {
                let values = items::iterate(&value, &self.limits)?;
                if values.len() != targets.len() {
                    return fail(format!("{} values cannot be assigned to {} names", values.len(), targets.len()));
                }
                targets.iter().zip(values).try_for_each(|(target, value)| self.set(target, value))
            }
        }
    }

    fn set_attribute(&mut self, name: &str, attribute: &Arc<str>, value: Value) -> Result<()> {
        self.limits.room_for_items(2)?;
        if attribute.starts_with('_') {
            return fail(format!("an attribute of a namespace cannot begin with `_`, as {attribute:?} does"));
        }
        let attributes = match self.variable(name) {
            Value::Object(object) => match &mut self.objects[object] {
                Object::Namespace(attributes) => Some(attributes),
                _ => None,
            },
            _ => None,
        };
        let Some(attributes) = attributes else {
            return fail(format!("`{name}` is no namespace, so its attributes cannot be set"));
        };
        match attributes.iter_mut().find(|(known, _)| known == attribute) {
            Some((_, known)) => *known = value,
            None => attributes.push((attribute.clone(), value)),
        }
        Ok(())
    }

    /// Renders the iterations of a loop over `items`, in `scope`.
    fn for_loop(&mut self, statement: &'t For, items: &Value, depth: usize, scope: usize) -> Result<()> {
        let items = self.loop_items(statement, items, scope)?;
        if items.is_empty() {
            let outside = self.enter(scope)?;
            self.statements(&statement.otherwise)?;
            self.leave(outside);
            return Ok(());
        }
        let state = Loop { statement, items: items.clone(), index: 0, depth, scope, changed: None };
        let object = self.object(Object::Loop(state))?;
        for item in &*items {
            let outside = self.enter(scope)?;
            self.set(&statement.target, item.clone())?;
            self.assign(&"loop".into(), object.clone())?;
            let flow = self.statements(&statement.body)?;
            self.leave(outside);
            if flow == Flow::Break {
                break;
            }
            self.next_pass(&object);
        }
        Ok(())
    }

    /// Returns the items of a loop that satisfy its condition.
    fn loop_items(&mut self, statement: &'t For, items: &Value, scope: usize) -> Result<Arc<[Value]>> {
        let mut items = items::iterate(items, &self.limits)?;
        if let Some(condition) = &statement.condition {
            let mut kept = Vec::new();
            for item in items {
                let outside = self.enter(scope)?;
                self.set(&statement.target, item.clone())?;
                if self.evaluate(condition)?.is_true() {
                    kept.push(item);
                }
                self.leave(outside);
            }
            items = kept;
        }
        Ok(items.into())
    }

    fn next_pass(&mut self, object: &Value) {
        if let Value::Object(object) = object
            && let Object::Loop(state) = &mut self.objects[*object]
        {
            state.index = (state.index + 1).min(state.items.len() - 1);
        }
    }

    /// Computes `loop(items)`: renders the same loop over other items.
    pub(crate) fn recurse(&mut self, object: usize, items: &Value) -> Result<Value> {
        let Object::Loop(Loop { statement, depth, scope, .. }) = &self.objects[object] else {
            unreachable!("the caller has looked")
        };
        let (statement, depth, scope) = (*statement, *depth, *scope);
        if !statement.recursive {
            return fail("`loop` can be called in a loop that is `recursive`");
        }
        let outside = std::mem::take(&mut self.out);
        self.deeper(0, |rendering| rendering.for_loop(statement, items, depth + 1, scope))?;
        let text = std::mem::replace(&mut self.out, outside);
        self.limits.text(text)
    }
}
