"use strict";
/* The conversation of the chat tab: its messages, and each as it is shown. */

class Conversation {
  constructor(panel) {
    this.panel = panel;
    this.root = byId("conversation");
    this.forget();
  }

  forget() {
    this.messages = [];
    this.question = this.answer = null;
    this.root.replaceChildren();
  }

  /** What is sent: the system message, if there is one, and all turns. */
  request(system) {
    return system.trim() ? [{ role: "system", content: system }, ...this.messages] : [...this.messages];
  }

  /** Add the user's turn and make room for the answer; what shows the answer's tokens. */
  ask(text) {
    this.messages.push({ role: "user", content: text });
    const answer = element("div.tokens");
    this.question = element("div.turn.user", element("h3", "You"), element("p", text));
    this.answer = element("div.turn", element("h3", "Model"), answer);
    this.root.append(this.question, this.answer);
    return new TokenView(answer, this.panel, "Answer, token by token");
  }

  /** Keep the answer, or take the question back if there was none. Whether it is kept. */
  end(text) {
    if (!this.question) return true; // the conversation was cleared while the answer came
    if (text) {
      this.messages.push({ role: "assistant", content: text });
      return true;
    }
    this.messages.pop();
    this.question.remove();
    this.answer.remove();
    return false;
  }
}
